"""Make docs/img/report.png: the top of a report on a real comparison, as chromium shows it.

    python scripts/make_screenshot.py              # runs the comparison first: some minutes
    python scripts/make_screenshot.py runs/a runs/b

Needs chromium (apt-get install chromium) and the dev extra.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = pathlib.Path(__file__).resolve().parents[1] / "docs" / "img" / "report.png"
WIDTH, HEIGHT = 1280, 900
LARGEST = 300_000  # bytes
METHODS, SEEDS, ROUNDS = ("fedavg", "feddf"), range(3), 8


def solera(*args: object) -> None:
    subprocess.run([sys.executable, "-m", "solera.cli.main", *map(str, args)], check=True)  # noqa: S603


def make_runs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Averaging against FedDF on the toy federation, three seeds each."""
    for method in METHODS:
        for seed in SEEDS:
            settings = ["--set", f"method.name={method}", "--seed", seed, "--rounds", ROUNDS]
            solera("run", "toy", *settings, "--out", folder / f"{method}-{seed}", "--quiet")
    return sorted(folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        parser.error("chromium is not installed")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = pathlib.Path(temporary)
        runs = options.runs or make_runs(folder / "runs")
        solera("report", *runs, "-o", folder / "report.html")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        theme = "dark" if options.dark else "light"
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
        page.goto((folder / "report.html").as_uri())
        page.wait_for_selector("html[data-ready]")
        last = page.locator("#figure-classes").bounding_box() or {"y": HEIGHT, "height": 0}
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": last["y"] + last["height"] + 16}
        page.screenshot(path=folder / "report.png", full_page=True, clip=clip)
        browser.close()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        Image.open(folder / "report.png").convert("RGB").quantize(128).save(options.out, optimize=True)
    size = options.out.stat().st_size
    print(f"{options.out}: {size} bytes")
    if size > LARGEST:
        sys.exit(f"larger than {LARGEST} bytes")


if __name__ == "__main__":
    main()
