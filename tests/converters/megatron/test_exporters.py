"""Numbers that exporters give to layers and experts, held against numbers written by hand."""

from __future__ import annotations

import pytest

from converters.megatron.exporters import EXPORTERS
from converters.megatron.pipeline import Pipeline

SLIME, MILES, VERL = EXPORTERS


def first_layers(name: str, pipeline: Pipeline) -> list[list[int]]:
    """The number of the first layer of every chunk, stage by stage."""
    (exporter,) = [exporter for exporter in EXPORTERS if exporter.name == name]
    return [
        [exporter.first_layer(pipeline, stage, chunk) for chunk in range(pipeline.vpp)] for stage in range(pipeline.pp)
    ]


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (Pipeline(12), [[0]]),
        (Pipeline(12, pp=2), [[0], [6]]),
        (Pipeline(12, pp=2, vpp=3), [[0, 4, 8], [2, 6, 10]]),
        (Pipeline(11, pp=3, last=3), [[0], [4], [8]]),
        (Pipeline(12, pp=4, first=2, last=4), [[0], [2], [5], [8]]),
        (Pipeline(14, pp=3, vpp=2, first=6), [[0, 7], [3, 10], [5, 12]]),
        # Embedding and output layer count as a layer of theirs: 5 + 6 + 5.
        (Pipeline(16, pp=3, embedding=True, loss=True), [[0], [5], [11]]),
        (Pipeline(10, pp=2, vpp=2, embedding=True, loss=True), [[0, 5], [2, 8]]),
        (Pipeline(12, pp=2, layout="Ett|t*10L"), [[0], [2]]),
        (Pipeline(12, pp=2, layout="Et*12|mL", mtp=1), [[0], [12]]),
    ],
)
def test_all_exporters_number_layers_as_megatron(pipeline: Pipeline, expected: list[list[int]]) -> None:
    assert [[chunk[0] if chunk else 12 for chunk in chunks] for chunks in pipeline.stages] == expected
    for exporter in EXPORTERS:
        assert first_layers(exporter.name, pipeline) == expected, exporter.name


def test_verl_is_one_stage_short_where_only_the_last_stage_of_an_interleaved_pipeline_is_given() -> None:
    """Stages of 4, 4 and 2 layers in two chunks each: chunk by chunk 2, 2 and 1 layers."""
    pipeline = Pipeline(10, pp=3, vpp=2, last=2)
    assert pipeline.stages == (((0, 1), (5, 6)), ((2, 3), (7, 8)), ((4,), (9,)))
    assert first_layers("slime", pipeline) == first_layers("miles", pipeline) == [[0, 5], [2, 7], [4, 9]]
    assert first_layers("verl without a bridge", pipeline) == [[0, 5], [0, 5], [2, 7]]


def test_experts_are_numbered_alike_where_the_ranks_divide_them() -> None:
    for exporter in EXPORTERS:
        assert [exporter.expert(12, 4, rank, 2) for rank in range(4)] == [2, 5, 8, 11]


def test_experts_are_numbered_apart_where_the_ranks_do_not_divide_them() -> None:
    """Ten over four ranks, which Megatron refuses."""
    assert [SLIME.expert(10, 4, rank, 0) for rank in range(4)] == [0, 2, 5, 7]
    assert [MILES.expert(10, 4, rank, 0) for rank in range(4)] == [0, 2, 5, 7]
    assert [VERL.expert(10, 4, rank, 0) for rank in range(4)] == [0, 2, 4, 6]
