"""The public surface and the papers: what a user may rely on stays as it is, and what is written is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import anyshard
from anyshard.testing.world import Worlds

ROOT = Path(__file__).parents[1]

ERRORS = """
    AnyshardError BlobExists BlobNotFound CheckpointDamaged CheckpointExists CheckpointNotFound CheckpointReplaced
    CommitConflict CommitOutcomeUnknown Difference EarlierSaveFailed InvalidAppState InvalidOption InvalidPath
    InvalidRegistration KeyValueStoreLost LimitExceeded LoadInterrupted Mismatch NotACheckpoint OperationFailed RankMissing
    RunInUse StateMismatch StillPending StorageDenied StorageError StorageFull StorageStuck StorageUnavailable StorageUnguarded
    StructureChanged TornSnapshot UnsupportedFormat UnsupportedValue
"""
VERBS = "prepare save async_save wait_all load open register_value escape shield_worker advise_interval job_mtbf_s"
RECORDS = """
    Checkpoint SaveReport LoadReport SaveOptions LoadOptions Event Sink LoggingSink JsonLinesSink PendingSave RankStatus
    StagingReport PrepareReport Layout LoadForecast IntervalAdvice
"""
RUNS = """
    Run StepInfo SplitStep PruneReport Preemption KeepPolicy KeepLast KeepEvery KeepFor KeepBest Protect WeightsOnly SavePolicy
    EverySteps EveryMinutes Continuously
"""
WRAPPERS = "PerRank RNGState"
MODULES = "errors ops"
PUBLIC = sorted([*f"{ERRORS} {VERBS} {RECORDS} {RUNS} {WRAPPERS} {MODULES}".split(), "__version__"])


def test_public_names_are_frozen() -> None:
    """Adding or removing a public name is a decision: it changes this list, the changelog and the docs."""
    assert (PUBLIC, PUBLIC) == (sorted(anyshard.__all__), dir(anyshard))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name: str) -> None:
    """Every public name is there when asked for."""
    assert getattr(anyshard, name) is not None


def test_all_errors_are_public() -> None:
    """Every error of the tree can be caught without knowing where it is defined."""
    tree = {
        name for name, value in vars(anyshard.errors).items() if isinstance(value, type) and value.__module__ == "anyshard.errors"
    }
    assert set(ERRORS.split()) == tree


def test_checkers_and_python_see_the_same_names() -> None:
    """The imports for type checkers name the module from which `__getattr__` takes each public name."""
    tree = ast.parse((ROOT / "src/anyshard/__init__.py").read_text(encoding="ascii"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    homes = {(f"anyshard.{home}", name) for home, names in anyshard._HOMES.items() for name in names}
    assert (
        homes | {("anyshard.errors", name) for name in ERRORS.split()} | {("anyshard", name) for name in MODULES.split()} == seen
    )


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that anyshard does not have fails as on any module."""
    with pytest.raises(AttributeError, match="no attribute 'restore'"):
        _ = anyshard.restore  # type: ignore[attr-defined]


def test_importing_anyshard_loads_nothing_heavy() -> None:
    """`import anyshard` loads none of its dependencies and none of its rooms."""
    code = "import sys; before = set(sys.modules); import anyshard; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    heavy = {"torch", "numpy", "pyarrow", "xxhash", "zstandard", "msgspec", "ml_dtypes", "transformers"}
    assert ["anyshard"] == [name for name in loaded if name.startswith("anyshard")]
    assert set() == heavy & {name.partition(".")[0] for name in loaded}


# Papers ----------------------------------------------------------------------------------------------------------------


def test_the_changelog_knows_the_version() -> None:
    """The version has a section in the changelog."""
    assert f"## [{anyshard.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_is_pinned() -> None:
    """constraints.txt has every package that pyproject asks for, at a version that it allows."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="ascii").split("\n") if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [
        Requirement(text) for group in (project["dependencies"], *project["optional-dependencies"].values()) for text in group
    ]
    assert [] == [str(one) for one in asked if pins.get(canonicalize_name(one.name), "0") not in one.specifier]


@pytest.mark.parametrize("paper", ["README.md", "CONTRIBUTING.md"])
def test_links_and_commands_of_papers_lead_somewhere(paper: str) -> None:
    """Every relative link names a file and every `make` command a target."""
    text = (ROOT / paper).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    commands = re.findall(r"`make ([a-z-]+)", text)
    makefile = (ROOT / "Makefile").read_text(encoding="ascii")
    assert links
    assert commands
    assert [] == [link for link in links if not (ROOT / link).exists()]
    assert [] == [command for command in commands if f"\n{command}:" not in makefile]


def read_code(*, is_job: bool) -> str:
    """The Python code of the README: that of its script `job.py`, or all else."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    return "".join(block for block in blocks if block.startswith("# job.py\n") == is_job)


def test_the_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the README, copied as it stands, runs in an empty directory and loads back what it saved."""
    monkeypatch.chdir(tmp_path)
    exec(compile(read_code(is_job=False), "README.md", "exec"), {})
    assert (tmp_path / "runs/a/step_100/manifest-1.json").is_file()


def run_job(directory: str, parallelism: str, start: str) -> None:
    """The script of the README on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr("sys.argv", ["job.py", parallelism, start])
        exec(compile(read_code(is_job=True), "job.py", "exec"), {})


@pytest.mark.slow
def test_the_readme_job_runs(worlds: Worlds, tmp_path: Path) -> None:
    """The script of the README goes on from 4 ranks with FSDP2 to 2 with tensor parallelism, and to a process alone."""
    worlds(4).run(run_job, str(tmp_path), "fsdp2", "0")
    worlds(2).run(run_job, str(tmp_path), "tp", "1")
    run_job(str(tmp_path), "none", "2")
    found = [anyshard.open(tmp_path / f"runs/b/step_{step}") for step in (1, 2, 3)]
    assert [(4, 1), (2, 2), (1, 3)] == [(one.manifest.world_size, one["steps/done"]) for one in found]


def test_the_page_of_many_ranks_names_what_there_is() -> None:
    """Every phase, error and field of a report in docs/many-ranks.md is one of the code."""
    text = (ROOT / "docs/many-ranks.md").read_text(encoding="utf-8")
    cells = [row.split(" | ")[0] for row in re.findall(r"^\| (`.*)", text, flags=re.MULTILINE)]
    words = {word for cell in cells for word in re.findall(r"`([A-Za-z_]+)`", cell)}
    sources = "".join(path.read_text(encoding="ascii") for path in (ROOT / "src/anyshard").rglob("*.py"))
    phases = set(re.findall(r"(?:phase|post|hear|receive|wait|announce)\([^()]*?\"([a-z]+)\"", sources))
    known = {*ERRORS.split(), *anyshard.SaveReport.__dataclass_fields__, "SaveReport", *phases}
    assert {"RankMissing", "durable", "differing_values"} <= words
    assert set() == words - known


@pytest.mark.slow
def test_the_claims_of_the_demo_hold() -> None:
    """`make demo` exits with 0: 4 ranks killed in the middle of a save, resumed on 2 by another parallelism; all claims hold."""
    demo = subprocess.run([sys.executable, ROOT / "examples/demo.py"], capture_output=True, text=True, timeout=280, check=False)
    assert (0, 0) == (demo.returncode, demo.stdout.count("FAILED")), demo.stdout + demo.stderr
