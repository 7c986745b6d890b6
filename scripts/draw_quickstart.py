"""Draw the README's picture from the quickstart's run directories.

solera quickstart --out runs/quickstart
python scripts/draw_quickstart.py runs/quickstart docs/img/quickstart.svg
"""

import pathlib
import sys

from solera.runs.read import read_run

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 300, 210, 44, 34, 36, 16
COLOURS = {"averaging alone": "#b0552c", "FedDF": "#1f6f8b", "ensemble of the clients": "#777777"}


def curves(home: pathlib.Path) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Accuracy by round: {architecture: {"averaging alone": [...], "FedDF": [...]}}, and the ensemble's."""
    read = {name: read_run(home / name).rounds for name in ("fedavg", "large")}
    models = {
        m: {
            label: [found[m]["accuracy"] for r in read[name] if m in (found := r.of("model"))]
            for label, name in (("averaging alone", "fedavg"), ("FedDF", "large"))
        }
        for m in read["large"][-1].of("model")
    }
    return models, [found["teachers"]["accuracy"] for r in read["large"] if (found := r.of("ensemble"))]


def polyline(values: list[float], x0: float, colour: str, dashed: bool = False) -> str:
    """One curve in the panel that begins at `x0`."""
    w, h = WIDTH - LEFT - GAP, HEIGHT - TOP - BOTTOM
    step = w / max(1, len(values) - 1)
    points = " ".join(f"{x0 + LEFT + i * step:.1f},{TOP + h * (1 - v):.1f}" for i, v in enumerate(values))
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'


def draw(home: pathlib.Path) -> str:
    """The picture: one panel for each architecture."""
    models, ensemble = curves(home)
    total = WIDTH * len(models)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT + 26}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{total}" height="{HEIGHT + 26}" fill="white"/>',
    ]
    h = HEIGHT - TOP - BOTTOM
    for i, (name, both) in enumerate(models.items()):
        x0 = i * WIDTH
        title = name if both["averaging alone"] else f"{name}, only on the server"
        out.append(f'<text x="{x0 + LEFT}" y="20" font-weight="bold">{title}</text>')
        for share in (0, 0.25, 0.5, 0.75, 1):
            y = TOP + h * (1 - share)
            out.append(f'<line x1="{x0 + LEFT}" x2="{x0 + WIDTH - GAP}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            out.append(f'<text x="{x0 + LEFT - 6}" y="{y + 4}" text-anchor="end" fill="#555">{share:.0%}</text>')
        out.append(polyline(ensemble, x0, COLOURS["ensemble of the clients"], dashed=True))
        out += [polyline(values, x0, COLOURS[label]) for label, values in both.items() if values]
        rounds = len(both["FedDF"])
        out.append(f'<text x="{x0 + LEFT}" y="{HEIGHT - 16}" fill="#555">round 1</text>')
        out.append(f'<text x="{x0 + WIDTH - GAP}" y="{HEIGHT - 16}" text-anchor="end" fill="#555">{rounds}</text>')
    for i, (label, colour) in enumerate(COLOURS.items()):
        x = LEFT + i * 190
        out.append(f'<rect x="{x}" y="{HEIGHT + 4}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="{HEIGHT + 14}">{label}</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    pathlib.Path(sys.argv[2]).write_text(draw(pathlib.Path(sys.argv[1])))
