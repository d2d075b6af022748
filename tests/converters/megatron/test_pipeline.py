"""Layers of pipeline stages: by hand, and against megatron-core's functions on every combination of small numbers."""

from itertools import product

import pytest
import torch
from support.messages import refusal, text_with

from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.core.errors import CkptkitError


def test_layers_of_each_stage_and_chunk():
    """Stage 0 has the first and the third part, stage 1 the second and the fourth."""
    assert Pipeline(5, 2, layout="Et*2|(t|)*2tmL", mtp=1).stages == (((0, 1), (3,)), ((2,), (4,)))
    listed = Pipeline(2, 2, layout=[["embedding"], ["decoder", "decoder", "loss"]])
    assert listed.stages == (((),), ((0, 1),))


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (Pipeline(7, 2), "num_layers 7 pipeline_model_parallel_size 2"),
        (Pipeline(8, 3, first=1), "7 2 stages"),
        (Pipeline(6, 2, vpp=2), "3 3 2 chunks"),
        (Pipeline(8, 2, vpp=2, first=4, last=4), "chunks"),
        (Pipeline(6, vpp=2), "pipeline"),
        (Pipeline(6, 0, layout="EL"), "pipeline sizes"),
        (Pipeline(7, 3, first=1, loss=True), "loss"),
        (Pipeline(4, 2, layout="Ett|ttL", first=2), "arguments"),
        (Pipeline(4, 2, layout="Ett|tt"), "one E one L"),
        (Pipeline(5, 2, layout="Ett|ttL"), "layout has 4 layers and 0 for multi-token prediction, the model 5 and 0"),
        (Pipeline(4, 2, layout="Ett|t|tL"), "layout has 3"),
        (Pipeline(4, 2, layout="Etm|tttL", mtp=1), "multi-token"),
        (Pipeline(4, 2, layout="Etx|tttL"), "layout"),
        (Pipeline(4, 2, layout=7), "layout"),
        (Pipeline(4, 2, layout="E(t)*99999999999|L"), "too long"),
    ],
)
def test_pipeline_that_megatron_refuses_is_refused(pipeline, said):
    with pytest.raises(CkptkitError) as error:
        pipeline.stages  # noqa: B018 - a cached property that raises
    assert error.value.message == text_with(said)


def test_pipeline_stages_follow_from_training_arguments():
    args = {"num_layers": 61, "pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 7}
    args |= {"decoder_last_pipeline_num_layers": 6, "mtp_num_layers": 1, "hidden_size": 64}
    pipeline = Pipeline.from_args(args)
    assert pipeline == Pipeline(61, 4, first=7, last=6, mtp=1)
    assert [len(chunk) for (chunk,) in pipeline.stages] == [7, 24, 24, 6]
    with pytest.raises(CkptkitError, match="decoder_last_pipeline_num_layers is 'six'"):
        Pipeline.from_args(args | {"decoder_last_pipeline_num_layers": "six"})
    refusal("have no num_layers", Pipeline.from_args, {})


def of_megatron(pipeline):
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    def layers(config, stage, chunk):
        if config.pipeline_model_parallel_layout is not None:
            return tuple(config.pipeline_model_parallel_layout.get_layer_id_list(vp_stage=chunk, pp_rank=stage))
        start = get_transformer_layer_offset(config, chunk, stage)
        return tuple(range(start, start + get_num_layers_to_build(config, chunk, stage)))

    try:
        config = TransformerConfig(
            num_layers=pipeline.layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pipeline.pp,
            virtual_pipeline_model_parallel_size=pipeline.vpp if pipeline.vpp > 1 else None,
            num_layers_in_first_pipeline_stage=pipeline.first,
            num_layers_in_last_pipeline_stage=pipeline.last,
            account_for_embedding_in_pipeline_split=pipeline.embedding,
            account_for_loss_in_pipeline_split=pipeline.loss,
            pipeline_model_parallel_layout=pipeline.layout,
            mtp_num_layers=pipeline.mtp or None,
            pipeline_dtype=torch.float32,
        )
        vpp = config.virtual_pipeline_model_parallel_size
        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
        chunks = range(vpp) if vpp else [None]
        return tuple(tuple(layers(config, stage, chunk) for chunk in chunks) for stage in range(pipeline.pp))
    except (AssertionError, ValueError, ZeroDivisionError):
        return None
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def ours(pipeline):
    try:
        return pipeline.stages
    except CkptkitError:
        return None


SIZES = (None, 1, 2, 3, 4)
LAYOUTS = (
    *("Ettttt|tttL", "E|t*8|L", "Et|tttt|t|t|t|L", "E(t|t)*4|L", "Ett,(t|)*4,t|tL", "Et*4|t*4|mL", "Et*4|t*4mL"),
    *("Et*7|tmmL", "Etm|t*7L", "Et*8|mm|L|", "E|t|L|L"),
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_pipeline_stages_agree_with_megatron(vpp):
    pytest.importorskip("megatron.core")
    agreed = 0
    for layers, pp, first, last in product(range(4, 13, 2), (2, 3, 4), SIZES, SIZES):
        if (first or 0) + (last or 0) > layers:
            continue  # Megatron does not notice
        pipeline = Pipeline(layers, pp, vpp, first, last)
        assert ours(pipeline) == of_megatron(pipeline), pipeline
        agreed += ours(pipeline) is not None
    for layers, pp, embedding, loss in product(range(1, 13), (1, 2, 3, 4), (False, True), (False, True)):
        if pp == 1 and vpp > 1:
            continue  # Megatron builds all layers into every chunk
        pipeline = Pipeline(layers, pp, vpp, embedding=embedding, loss=loss)
        assert ours(pipeline) == of_megatron(pipeline), pipeline
        agreed += ours(pipeline) is not None
    assert agreed > 20


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pipeline_layouts_agree_with_megatron():
    pytest.importorskip("megatron.core")
    for layout, pp, mtp in product(LAYOUTS, (2, 3, 4), (0, 1, 2)):
        pipeline = Pipeline(8, pp, layout=layout, mtp=mtp)
        assert ours(pipeline) == of_megatron(pipeline), pipeline
