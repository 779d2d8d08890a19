"""The operations pages name flags, variables, metrics and reasons that exist, and their links lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from engine_core.config import EngineSettings
from frontend.config import FrontendSettings
from stepwire.grpc_errors import REASONS

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "operations").glob("*.md"),
        *ROOT.glob("*.md"),
        ROOT / "k8s" / "README.md",
    ]
)
OPERATIONS = [page for page in PAGES if page.parent.name == "operations" or page.name in ("errors.md", "versioning.md")]
METRICS = set(re.findall(r"(?m)^(stepwire_\w+) ", (ROOT / "tests/golden/metrics.txt").read_text(encoding="utf-8")))
SETTINGS = {**EngineSettings.model_fields, **FrontendSettings.model_fields}
# Those of curl, openssl and pip in the blocks.


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OPERATIONS, ids=ids)
def test_variables_that_are_named_exist(page: Path):
    named = set(re.findall(r"\bSTEPWIRE_([A-Z_]+)\b", page.read_text(encoding="utf-8")))
    # A mistake that is shown on purpose, and the one of the command line.
    assert named - {"MAX_SEQS", "TOKEN"} <= {name.upper() for name in SETTINGS}


@pytest.mark.parametrize("page", OPERATIONS, ids=ids)
def test_metrics_that_are_named_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    whole = {name for name in re.findall(r"`(stepwire_\w+)[`{]", text) if not name.endswith("_")}
    ends = set(re.findall(r"`\.\.(_\w+)`", text))
    assert whole <= METRICS
    assert {end for end in ends if not any(name.endswith(end) for name in METRICS)} == set()


@pytest.mark.parametrize("page", OPERATIONS, ids=ids)
def test_reasons_that_are_named_exist(page: Path):
    named = set(re.findall(r"/ ([A-Z]+_[A-Z]+)\b", page.read_text(encoding="utf-8")))
    assert named <= REASONS.keys()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_to_files_and_headings(page: Path):
    # Pictures aside.
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")) or target.endswith(".png"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), target


def unit_of_the_engine() -> str:
    text = (ROOT / "docs/operations/install.md").read_text(encoding="utf-8")
    return re.search(r"(?ms)^```ini\n(.*?)^```$", text)[1]  # type: ignore[index]


def test_the_unit_waits_for_the_drain_that_it_sets():
    unit = unit_of_the_engine()
    drain_s = int(re.search(r"STEPWIRE_DRAIN_TIMEOUT_S=(\d+)", unit)[1])  # type: ignore[index]
    assert f"TimeoutStopSec={drain_s + 15}\n" in unit
    assert "ExecStart=/opt/stepwire/bin/python -m engine_core\n" in unit


def test_systemd_takes_the_unit(tmp_path: Path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    # The documented program is not installed here.
    unit = unit_of_the_engine().replace("/opt/stepwire/bin/python", "/bin/true").replace("User=stepwire", "User=root")
    (tmp_path / "stepwire-engine-core.service").write_text(unit)
    command = [program, "verify", "--man=no", str(tmp_path / "stepwire-engine-core.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "stepwire-engine-core.service" not in done.stdout + done.stderr


def test_extras_that_are_installed_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"(?:'\.|stepwire|`)\[([a-z]+)\]", page.read_text(encoding="utf-8")))
    assert named >= {"frontend", "engine", "compat", "bench"}
    assert named <= set(project["optional-dependencies"])
