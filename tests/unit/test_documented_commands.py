"""Commands that the documentation shows are right: sub-commands, flags, targets, objects and files of them exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from typing import Any

import pytest
from typer.main import get_command

import launcher.observe
import launcher.options
from checkout import ROOT
from documented_commands import PAGES, Command, commands
from engine_core.config import EngineSettings
from frontend.config import FrontendSettings
from manifests import Build, name_of, render
from skips import require_program
from stepwire_client.cli import app

COMMANDS = commands()
CLI: Any = get_command(app)
# Sub-commands of kubectl that have sub-commands.
NESTED = ("rollout", "create")
SHORT_FLAGS = {"-n": "--namespace", "-f": "--filename", "-k": "--kustomize"}
# Beginnings of paths in the repository.
TREES = ["bench", "clients", "deploy", "docs", "k8s", "protos", "scripts", "services", "shared", "tests"]
# Of curl, docker, pip, helm, kubectl, buf, pkg-config, protoc, systemctl, useradd and smg.
FOREIGN = {
    "--backend", "--cascade", "--cert", "--cflags", "--data", "--fail", "--for", "--from-file", "--grpc-java", "--help",
    "--http", "--install", "--java", "--key", "--libs", "--no-binary", "--no-buffer", "--no-deps", "--now", "--output",
    "--plugin", "--policy", "--prefix", "--previous", "--project-name", "--protocol", "--raw", "--schema",
    "--selector", "--silent", "--sort-by", "--system", "--values", "--worker-urls", "--write-out",
    # Of podman and buildah.
    "--cap-drop", "--detach", "--env", "--isolation", "--name", "--network", "--publish", "--pull", "--read-only",
    "--time", "--tmpfs", "--volume", "--volumes",
}  # fmt: skip
# Of the benchmarks, the fuzzers and the table of targets.
OTHER_PROGRAMS = {"--document", "--fuzz-seed", "--rounds", "--strict", "--tiny"}
# Written by a run.
MADE = "bench/results"


def of_program(*names: str) -> list[Command]:
    found = [command for command in COMMANDS if command.program in names]
    assert found, f"no page shows {' or '.join(names)}"
    return found


def settings_flags(settings: type[Any]) -> set[str]:
    names = {name.replace("_", "-") for name in settings.model_fields}
    return {f"--{name}" for name in names} | {f"--no-{name}" for name in names} | {"--help"}


def test_services_have_the_flags():
    for module, settings in (("engine_core", EngineSettings), ("frontend", FrontendSettings)):
        for command in of_program(module):
            assert set(command.flags) <= settings_flags(settings), command


def launcher_flags() -> set[str]:
    """Its own and, behind them, the engine's."""
    own = set(launcher.options._parser()._option_string_actions)
    return own | settings_flags(EngineSettings) - set(launcher.options.PLACED)


def options_of_the_command_line() -> set[str]:
    places, found = [CLI], set()
    while places:
        place: Any = places.pop()
        places += getattr(place, "commands", {}).values()
        found |= {name for parameter in place.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_in_the_text_exist(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", page.read_text(encoding="utf-8")))
    services = settings_flags(EngineSettings) | settings_flags(FrontendSettings)
    ours = services | launcher_flags() | set(launcher.observe._parser()._option_string_actions)
    assert named - ours - options_of_the_command_line() - FOREIGN - OTHER_PROGRAMS == set()


def test_make_has_the_targets_and_variables_and_its_flags_exist():
    for command in of_program("make"):
        words = list(command.args)
        directory = ROOT / words.pop(1) if words[:1] == ["-C"] else ROOT
        words = [word for word in words if not word.startswith("-")]
        given = dict(word.split("=", 1) for word in words if "=" in word)
        makefile = (directory / "Makefile").read_text(encoding="utf-8")
        targets = set(re.findall(r"(?m)^([a-z][a-z-]*):", makefile))
        assert {word for word in words if "=" not in word and re.fullmatch(r"[a-z-]+", word)} <= targets, command
        assert set(given) <= set(re.findall(r"(?m)^([A-Z_]+) [?:]?=", makefile)), command
        inner = Command(command.page, "launcher", tuple(given.get("ARGS", "").split()))
        parsers = {"run": launcher_flags(), "observe": set(launcher.observe._parser()._option_string_actions)}
        if words and words[0] in parsers:
            assert set(inner.flags) <= parsers[words[0]], command


def test_the_command_line_has_the_sub_commands_and_options():
    for command in of_program("stepwire"):
        place: Any = CLI
        known: set[str] = {"--help"}
        for word in command.args:
            if "commands" in vars(place) and word in place.commands:
                place, known = place.commands[word], {"--help"}
            known |= {name for parameter in place.params for name in (*parameter.opts, *parameter.secondary_opts)}
            name = word.partition("=")[0]
            # A number is no flag: --priority -1.
            assert not re.match(r"--?[a-zA-Z]", word) or name in known, command


def test_the_command_line_is_never_asked_for_a_command_that_it_does_not_have():
    for command in of_program("stepwire"):
        words = [word for word in command.args if re.fullmatch(r"[a-z][a-z-]+", word)]
        options = [word for word in command.args if word.startswith("--")]
        if not words or (options and command.args[0] == options[0]):
            continue
        assert words[0] in CLI.commands, command
        if words[0] == "admin" and len(words) > 1:
            assert words[1] in CLI.commands["admin"].commands, command


@cache
def kubectl_flags(*verb: str) -> set[str]:
    program = require_program("kubectl", how="kubectl 1.27 or newer, which renders without a cluster")
    said = ""
    for words in ([*verb, "--help"], ["options"]):
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=True)
        said += done.stdout
    return set(re.findall(r"--[a-z][a-z-]+", said))


def kubectl_verb(command: Command) -> list[str]:
    """Without the flags in front of it."""
    words = list(command.args)
    while words and words[0].startswith("-"):
        words = words[1 if "=" in words[0] else 2 :]
    depth = 3 if words[:2] == ["create", "secret"] else 2 if words[:1] and words[0] in NESTED else 1
    return [word for word in words[:depth] if re.fullmatch(r"[a-z-]+", word)]


def test_kubectl_has_the_verbs_and_flags():
    for command in of_program("kubectl"):
        flags = {SHORT_FLAGS.get(flag, flag) for flag in command.flags if flag not in ("-i", "-o")}
        assert flags <= kubectl_flags(*kubectl_verb(command)) | {"--kustomize"}, command


def test_what_kubectl_is_asked_for_is_in_the_manifests():
    known = {name_of(item).lower() for item in render(Build("overlays/cpu"))}
    kinds = ("statefulset", "deployment", "service")
    for command in of_program("kubectl"):
        for kind, name in re.findall(r"\b(\w+)/([\w-]+)", " ".join(command.args)):
            if kind in kinds:
                assert f"{kind}/{name}" in known, command
        for flag, value in zip(command.args, command.args[1:], strict=False):
            if flag == "-k" and value.startswith("k8s"):
                assert (ROOT / value / "kustomization.yaml").is_file(), command
            if flag == "-n":
                assert value == "stepwire", command


def test_images_that_are_named_are_those_of_the_overlay():
    text = str(render(Build("overlays/cpu")))
    for command in of_program("kind"):
        for image in (word for word in command.args if word.startswith("stepwire/")):
            assert image in text, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    places = (ROOT, page.parent)
    for name in re.findall(rf"`((?:{'|'.join(TREES)})/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert name.startswith(MADE) or any((place / name).exists() for place in places), name


def test_from_a_clone_to_an_answer_on_kubernetes_it_takes_five_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"(?ms)^## Kubernetes\n.*?^```\n(.*?)^```$", readme)[1]  # type: ignore[index]
    lines = block.splitlines()
    assert len(lines) <= 5
    assert lines[0].split()[0] == "make"
    assert "kubectl apply -k k8s/" in block
    # A ready engine is not yet one that a frontend is attached to.
    assert lines[-2].split()[3:6] == ["wait", "--for=condition=Available", "deployment/stepwire-frontend"]
    assert "stepwire generate" in lines[-1]
