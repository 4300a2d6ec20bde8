"""Diagnoses as data, as the message of an error, and as a page."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmem import SchemaError
from xmem.diagnosis import Advice, Diagnosis, Owner, from_json, read
from xmem.diagnosis_text import headline, markdown, text

MIB = 2**20


def diagnosis(**changes):
    given = {
        "backend": "torch",
        "device": "cpu",
        "framework_version": "2.13.0",
        "xmem_version": "0.1.0",
        "phase": "forward",
        "module": "blocks.2.attention",
        "requested_bytes": 4 * MIB,
        "allocated_bytes": 60 * MIB,
        "reserved_bytes": 80 * MIB,
        "limit_bytes": 62 * MIB,
        "process_bytes": 300 * MIB,
        "largest_free_bytes": MIB,
        "fragmentation": 0.25,
        "by_category": {"parameter": 20 * MIB, "activation": 40 * MIB},
        "owners": (
            Owner(name="blocks.1", category="activation", size_bytes=30 * MIB, block_count=7),
            Owner(name="gradient of head.weight", category="gradient", size_bytes=MIB),
        ),
        "advice": (
            Advice(
                technique="autocast",
                call="with xmem.autocast(): loss = ...",
                why="halves",
                expected_bytes=10 * MIB,
                is_enough=True,
            ),
            Advice(technique="checkpoint", call="xmem.apply_checkpointing(...)", why="asks"),
        ),
        "settings": {"threads": "2"},
        "stack": ("shop/train.py:12 in step",),
        "message": "CPU out of memory.",
    }
    return Diagnosis(**{**given, **changes})


sizes = st.none() | st.integers(0, 2**60)


@given(
    requested=sizes,
    allocated=sizes,
    limit=sizes,
    categories=st.none() | st.dictionaries(st.text(max_size=5), st.integers(0, 2**60), max_size=3),
    name=st.text(max_size=8),
    phase=st.sampled_from(["forward", "backward", "optimizer", "outside"]),
)
def test_what_is_written_is_read_back_equal(requested, allocated, limit, categories, name, phase):
    before = diagnosis(
        requested_bytes=requested,
        allocated_bytes=allocated,
        limit_bytes=limit,
        by_category=categories,
        owners=(Owner(name=name, category=name, size_bytes=limit or 0),),
        phase=phase,
        module=name,
    )
    assert from_json(before.to_json()) == before
    # whatever is unknown, there is a text
    assert " out of memory." in text(before).splitlines()[0]
    assert markdown(before).startswith("# Out of memory\n")


def test_json_is_plain_and_names_its_version():
    raw = json.loads(diagnosis().to_json())
    assert raw["schema_version"] == 1
    assert raw["by_category"] == {"parameter": 20 * MIB, "activation": 40 * MIB}
    assert raw["advice"][1]["expected_bytes"] is None


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"{}", b'{"schema_version": 2}', b'{"schema_version": 1, "backend": 3}'],
)
def test_what_is_no_diagnosis_of_this_version_is_refused(content):
    with pytest.raises(SchemaError):
        from_json(content)


def test_a_bundle_and_its_file_read_alike(tmp_path):
    (tmp_path / "diagnosis.json").write_bytes(diagnosis().to_json())
    assert read(tmp_path) == read(tmp_path / "diagnosis.json") == diagnosis()
    with pytest.raises(SchemaError, match="cannot be read"):
        read(tmp_path / "nothing.json")


def test_missing_bytes_are_what_has_to_be_free_for_the_request():
    assert diagnosis().missing_bytes == 2 * MIB
    assert diagnosis(limit_bytes=None).missing_bytes == 4 * MIB
    assert diagnosis(requested_bytes=None).missing_bytes is None
    assert diagnosis(limit_bytes=90 * MIB).missing_bytes == 0


def test_the_first_line_says_what_happened():
    assert headline(diagnosis()) == (
        "CPU out of memory. 4.00 MiB were requested in forward of blocks.2.attention; 60.00 MiB are"
        " allocated and the limit is 62.00 MiB: 2.00 MiB too few."
    )
    system = diagnosis(limit_bytes=None, module="", phase="optimizer", device="cuda")
    assert headline(system) == (
        "CUDA out of memory. 4.00 MiB were requested in the optimizer's step; 60.00 MiB are"
        " allocated and the system has no more."
    )


def test_the_text_has_categories_owners_and_advice_largest_first():
    lines = str(diagnosis()).splitlines()
    assert lines[1] == "Allocated: activation 40.00 MiB, parameter 20.00 MiB."
    assert lines[3].split() == ["30.00", "MiB", "blocks.1", "(activation)"]
    assert lines[6].strip().startswith("10.00 MiB  with xmem.autocast()")
    assert lines[7].strip().startswith("?  xmem.apply_checkpointing")


def test_the_text_says_when_parameters_may_be_half_updated():
    assert "go on from a checkpoint" not in text(diagnosis())
    assert "go on from a checkpoint" in text(diagnosis(may_be_updated=True))
    assert "go on from a checkpoint" in markdown(diagnosis(may_be_updated=True))


def test_a_request_of_unknown_size_is_said_to_be_one():
    unknown = diagnosis(requested_bytes=None)
    assert headline(unknown) == (
        "CPU out of memory. A request in forward of blocks.2.attention was refused; how much it"
        " asked for is not known. 60.00 MiB are allocated."
    )
    assert headline(diagnosis(requested_bytes=None, allocated_bytes=None)).endswith("not known.")


def test_the_page_has_exact_bytes_and_every_part():
    page = markdown(diagnosis())
    for line in (
        "| requested | 4.00 MiB (4,194,304 B) |",
        "| fragmentation | 25.0% |",
        "| activation | 40.00 MiB (41,943,040 B) | 66.7% |",
        "| blocks.1 | activation | 7 | 30.00 MiB (31,457,280 B) |",
        "| `with xmem.autocast(): loss = ...` | halves | 10.00 MiB | yes |",
        "| `xmem.apply_checkpointing(...)` | asks | ? | ? |",
        "| threads | 2 |",
        "- `shop/train.py:12 in step`",
        "    CPU out of memory.",
    ):
        assert line in page.splitlines(), line


def test_a_bar_in_a_name_does_not_break_a_table():
    owners = (Owner(name="a|b\nc", category="other", size_bytes=1),)
    assert "| a\\|b c | other | 1 | 1 B |" in markdown(diagnosis(owners=owners)).splitlines()
