"""Every overlay and every component renders, is valid for several versions of Kubernetes, and keeps our own rules."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from manifest_pods import check_pods
from manifest_references import check_references
from manifest_schemas import VERSIONS, custom_findings, schema_findings
from manifest_traffic import check_traffic
from manifests import (
    BUILDS,
    COLOCATED,
    COMPONENTS,
    K8S,
    OVERLAYS,
    Build,
    Manifest,
    kustomize,
    of_kind,
    pod_of,
    render,
    workloads,
)

# Fields that the oldest version does not know, and the components that need them.
TOO_NEW = {"1.29": ("model-image",)}


def all_objects(without: tuple[str, ...] = ()) -> list[Manifest]:
    """Each object once, however many builds have it."""
    builds = [build for build in BUILDS if not set(without) & set(build.components)]
    unique = {json.dumps(item, sort_keys=True): item for build in builds for item in render(build)}
    return list(unique.values())


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_every_build_keeps_the_rules_for_pods_and_fits_together(build: Build):
    items = render(build)
    assert [*check_pods(items), *check_references(items), *check_traffic(items)] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for(version: str):
    assert list(schema_findings(all_objects(TOO_NEW.get(version, ())), version)) == []


def test_custom_resources_are_what_their_operators_know():
    custom = all_objects()
    assert custom_findings(custom) == []


def test_nothing_but_components_needs_an_operator():
    for build in OVERLAYS:
        if build.overlay != "overlays/ha":
            assert all("." not in item["apiVersion"].partition("/")[0].replace(".k8s.io", "") for item in render(build))


def test_every_overlay_and_component_is_tried():
    overlays = {path.name for path in (K8S / "overlays").iterdir()}
    assert overlays == {build.overlay.removeprefix("overlays/") for build in OVERLAYS} - {"."}
    used = {name for build in COMPONENTS for name in build.components}
    kustomizations = [yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text()) for name in overlays]
    used |= {path.rpartition("/")[2] for item in kustomizations for path in item.get("components", [])}
    assert used == {path.name for path in (K8S / "components").iterdir()}


def test_every_file_is_used():
    files = {path for path in K8S.rglob("*") if path.is_file() and path.name != "kustomization.yaml"}
    for path in files - {K8S / "README.md", K8S / "components" / "hpa" / "adapter-rules.yaml"}:
        assert path.name in (path.parent / "kustomization.yaml").read_text(), path


def test_the_root_is_the_overlay_for_one_gpu():
    items = render(Build("."))
    assert items == render(Build("overlays/gpu"))
    [engine] = of_kind(items, "StatefulSet")
    assert engine["spec"]["replicas"] == 1
    assert engine["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_changed_setting_gets_a_new_name_and_so_a_rolling_update():
    names = {
        item["metadata"]["name"]
        for name in ("cpu", "test")
        for item in of_kind(render(Build(f"overlays/{name}")), "ConfigMap")
    }
    assert len(names) == 4


def test_no_secret_is_committed():
    assert of_kind(all_objects(), "Secret") == []


def test_ha_spreads_frontends_hard_and_engines_as_far_as_gpus_allow():
    hard = {
        item["kind"]: (constraint["whenUnsatisfiable"], constraint["nodeTaintsPolicy"])
        for item in workloads(render(Build("overlays/ha")))
        for constraint in pod_of(item)["topologySpreadConstraints"]
        if constraint["topologyKey"] == "kubernetes.io/hostname"
    }
    assert hard == {"Deployment": ("DoNotSchedule", "Honor"), "StatefulSet": ("ScheduleAnyway", "Honor")}


def test_an_overlay_can_ask_for_a_second_engine_as_the_page_on_upgrades_says(tmp_path: Path):
    said = re.search(r"`(replicas: \[.+?\])`", (K8S / "README.md").read_text(encoding="utf-8"))
    assert said is not None
    base = os.path.relpath(K8S.resolve(), tmp_path.resolve())
    overlay = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    overlay |= {"resources": [f"{base}/overlays/gpu"], **yaml.safe_load(said[1])}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    [engine] = of_kind(kustomize(tmp_path), "StatefulSet")
    assert engine["spec"]["replicas"] == 2


def test_shared_memory_is_there_where_nccl_looks_for_it_and_is_bounded():
    [engine] = of_kind(render(Build("overlays/cpu", ("shared-memory",))), "StatefulSet")
    [mount] = [mount for mount in pod_of(engine)["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    [volume] = [volume for volume in pod_of(engine)["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


def test_the_page_names_what_goes_with_colocated_pods():
    said = re.search(r"(?s)With `colocated` go (.+?)\.", (K8S / "README.md").read_text(encoding="utf-8"))
    assert said is not None
    assert set(re.findall(r"`([\w-]+)`", said[1])) == set(COLOCATED)
