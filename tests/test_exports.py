"""The public names, pinned: a name added or removed is a decision."""

import pathlib
import re
import subprocess
import sys

import pytest

import solera

USERS = [
    "Availability", "Callback", "Config", "ConfigError", "DataConfig", "DataError", "EngineConfig", "FederationConfig",
    "ModelsConfig", "PartitionConfig", "PublicConfig", "Result", "RunConfig", "RunError", "Scenario", "SoleraError",
    "StopConfig", "TrackConfig", "__version__", "compare", "frame", "from_tensors", "from_torch", "load_config",
    "resume", "run", "simulate",
]  # fmt: skip
MODULES = ["data", "engines", "method", "methods", "models", "testing"]


def test_these_are_the_public_names():
    assert solera.__all__ == sorted([*USERS, *MODULES]) == dir(solera)
    for name in solera.__all__:
        assert getattr(solera, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Watcher'"):
        solera.Watcher  # noqa: B018


def test_what_users_hold_says_in_one_line_what_it_is(tmp_path):
    scenario = solera.testing.toy()
    dataset, partition = scenario.dataset, scenario.partition
    result = solera.simulate(
        scenario, solera.testing.small(solera.methods.FedAvg()), tmp_path, solera.RunConfig(rounds=1)
    )
    samples = f"{len(dataset.train)} training and {len(dataset.test)} test samples"
    assert repr(dataset) == f"Dataset({dataset.name}: {samples} of shape {dataset.shape}, {dataset.classes} classes)"
    assert repr(partition) == f"Partition({len(partition)} clients, {len(partition.order)} samples)"
    clients = f"{len(scenario.roster)} clients with {', '.join(scenario.roster.architectures)}"
    assert repr(scenario) == f"Scenario({dataset.name}: {clients}; {len(scenario.public)} public samples, seed 0)"
    said = repr(result)
    assert said.startswith("Result(fedavg, 1 rounds, ")
    assert said.endswith(f", digest {result.digest[:16]}, {tmp_path})")
    assert max(map(len, map(repr, (dataset, partition, scenario)))) < 120


def test_importing_the_package_does_not_import_torch():
    code = "import sys, solera; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_every_method_that_comes_with_the_library_can_be_imported_from_its_package():
    from solera import methods
    from solera.method import METHODS
    from solera.methods import MNFL, MNFLParameters, PFedDF, SimPFL, TopKPFL

    assert [MNFL, MNFLParameters, PFedDF, SimPFL, TopKPFL] == [
        METHODS[name] for name in ("mnfl", "mnflparam", "pfeddf", "simpfl", "topkpfl")
    ]
    ours = {cls for cls in METHODS.values() if cls.__module__.startswith("solera.methods.")}
    assert len(ours) > 30
    for cls in ours:
        assert getattr(methods, cls.__name__, None) is cls, f"solera.methods does not export {cls.__name__}"


def test_one_import_has_all_that_a_method_needs():
    from solera import method

    assert method.__all__ == sorted(method.__all__)
    needed = (
        "Method register task Client like sized at_most fit evaluate distill Local Distill Score Weights Model Traits"
    )
    needed += " Traits About PublicRows Trains"  # and what their signatures name
    assert set(method.__all__) == {
        *needed.split(), "Exchange", "Federation", "Server", "per_client", "settings", "weights_of"
    }  # fmt: skip
    assert all(getattr(method, name) is not None for name in method.__all__)
    example = (pathlib.Path(__file__).parent.parent / "examples" / "own_method.py").read_text()
    rooms = set(re.findall(r"^(?:from|import) (solera[\w.]*)", example, re.M))
    assert rooms == {"solera.method", "solera.testing"}  # the second one checks it
