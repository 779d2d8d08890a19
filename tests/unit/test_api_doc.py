"""The API reference is made from the protos, names everything in them, and its links lead somewhere."""

from __future__ import annotations

import re

import pytest

from scripts.api_doc import PAGES, ROOT, Page, descriptors

FILES = descriptors()


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_made_from_the_protos(name: str):
    package, head = PAGES[name]
    assert (ROOT / name).read_text(encoding="utf-8") == Page(package, FILES).text(head), "run `make api-doc`"


@pytest.mark.parametrize("name", PAGES)
def test_every_message_service_and_enum_has_its_heading(name: str):
    headings = set(re.findall(r"(?m)^#{3,4} (\S+)$", (ROOT / name).read_text(encoding="utf-8")))
    for file in FILES:
        if file.package == PAGES[name][0]:
            assert {part.name for part in [*file.service, *file.message_type, *file.enum_type]} <= headings


@pytest.mark.parametrize("name", PAGES)
def test_links_of_types_lead_to_headings_of_the_page(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    anchors = {heading.lower().replace(".", "") for heading in re.findall(r"(?m)^#{2,4} (\S+)$", text)}
    targets = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert targets
    assert targets <= anchors


def test_comments_for_tools_are_left_out():
    assert not any("buf:lint" in (ROOT / name).read_text(encoding="utf-8") for name in PAGES)
