"""What megatron-core 0.13 to 0.19 saved comes back as it was: `megatron_versions/make.py` made the archives.

Two ranks saved, tensor parallel 2. Every tensor is filled with a number of its own; the second rank's part of one that
is cut has half more.
"""

import io
import pickle
import struct
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_dist.foreign_names import refuse_foreign_names
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_dist.training_state import optimizer_state, training_state
from ckptkit.formats.torch_save.records import Dtype

ARCHIVES = Path(__file__).parent / "megatron_versions"
VERSIONS = ("0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
# Shape, the axis along which it is cut (GATE_UP: each half of the rows is), and the number that fills it.
GATE_UP = -1
WEIGHTS = {
    "embedding.word_embeddings.weight": ((64, 16), 0, 16),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": ((16,), None, 1),
    "decoder.layers.0.self_attention.linear_qkv.weight": ((32, 16), 0, 6),
    "decoder.layers.0.self_attention.linear_proj.weight": ((16, 16), 1, 5),
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": ((16,), None, 4),
    "decoder.layers.0.mlp.linear_fc1.weight": ((64, 16), GATE_UP, 2),
    "decoder.layers.0.mlp.linear_fc2.weight": ((16, 32), 1, 3),
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": ((16,), None, 7),
    "decoder.layers.1.self_attention.linear_qkv.weight": ((32, 16), 0, 15),
    "decoder.layers.1.self_attention.linear_proj.weight": ((16, 16), 1, 14),
    "decoder.layers.1.pre_mlp_layernorm.weight": ((16,), None, 13),
    "decoder.layers.1.mlp.router.weight": ((2, 16), None, 12),
    "decoder.layers.1.mlp.experts.experts.0.linear_fc1.weight": ((16, 16), GATE_UP, 8),
    "decoder.layers.1.mlp.experts.experts.0.linear_fc2.weight": ((16, 8), 1, 9),
    "decoder.layers.1.mlp.experts.experts.1.linear_fc1.weight": ((16, 16), GATE_UP, 10),
    "decoder.layers.1.mlp.experts.experts.1.linear_fc2.weight": ((16, 8), 1, 11),
    "decoder.final_layernorm.weight": ((16,), None, 0),
    "output_layer.weight": ((64, 16), 0, 17),
}
# Some keys as they are stored: the size of a chunk, and the offset and rank of each.
CHUNKS = {
    "decoder.layers.0.mlp.linear_fc1.weight": ((16, 16), [((0, 0), 0), ((16, 0), 1), ((32, 0), 0), ((48, 0), 1)]),
    "decoder.layers.1.mlp.experts.experts.linear_fc2.weight": (
        (1, 16, 4),
        [((0, 0, 0), 0), ((0, 0, 4), 1), ((1, 0, 0), 0), ((1, 0, 4), 1)],
    ),
    "output_layer.weight": ((32, 16), [((0, 0), 0), ((32, 0), 1)]),
    "decoder.layers.1.mlp.router.weight": ((2, 16), [((0, 0), 0)]),
}
PLAIN_ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_query_groups": 2,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "swiglu": True,
    "moe_layer_freq": [0, 1],
    "normalization": "RMSNorm",
    "lr": 1e-4,
    "load": None,
    "cp_comm_type": ["p2p"],
    "padded_vocab_size": 64,
    "params_dtype": Dtype("bfloat16"),
    "hf_checkpoint": "/models/tiny",
    "apply_chat_template_kwargs": {"enable_thinking": False},
    "sglang_model_routers": {"default": ("10.0.0.1", 3000)},
    "train_env_vars": {},
    "rollout_stop": None,
}
EXTRA_STATES = {
    *(f"decoder.layers.{layer}.self_attention.linear_{name}" for layer in (0, 1) for name in ("qkv", "proj")),
    *(f"decoder.layers.0.mlp.linear_{name}" for name in ("fc1", "fc2")),
    *(f"decoder.layers.1.mlp.experts.experts.linear_{name}" for name in ("fc1", "fc2")),
}


def unpack(archive, folder):
    with tarfile.open(archive) as opened:
        opened.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
        opened.extractall(folder)  # noqa: S202 - filtered, as far as Python can
    return folder


@pytest.fixture(scope="module", params=VERSIONS)
def release(request, tmp_path_factory):
    return unpack(ARCHIVES / f"{request.param}.tar.xz", tmp_path_factory.mktemp("versions") / request.param)


@pytest.fixture
def copied(tmp_path):
    return unpack(ARCHIVES / "0.18.2.tar.xz", tmp_path / "release")


def expected(shape, axis, number):
    whole = torch.full(shape, number, dtype=torch.bfloat16)
    if axis is not None:
        parts = whole.chunk(2) if axis == GATE_UP else (whole,)
        for part in parts:
            part.chunk(2, dim=max(axis, 0))[1].add_(0.5)
    return whole


def described(value):
    return value.kind, value.args


def test_each_archive_has_its_version_here():
    assert sorted(file.name for file in ARCHIVES.glob("*.xz")) == [f"{version}.tar.xz" for version in VERSIONS]


def assert_whole(checkpoint):
    assert {name: (spec.shape, spec.dtype) for name, spec in checkpoint.specs.items()} == {
        name: (shape, "bfloat16") for name, (shape, _, _) in WEIGHTS.items()
    }
    for name, tensor in checkpoint.read(list(WEIGHTS)).items():
        assert torch.equal(tensor, expected(*WEIGHTS[name])), name


def test_every_weight_comes_back_from_the_chunks_that_the_ranks_wrote(release):
    checkpoint = TorchDistCheckpoint(release)
    assert_whole(checkpoint)
    for key, (sizes, places) in CHUNKS.items():
        chunks = checkpoint.metadata.tensors[key].chunks
        found = sorted((one.offsets, int(one.blob.path.name.split("_")[2])) for one in chunks)
        assert (found, {one.sizes for one in chunks}) == (places, {sizes}), key
    refuse_foreign_names(release)  # lets it through to real Megatron


def test_the_arguments_come_back_with_inert_records_for_classes(release):
    args = TorchDistCheckpoint(release).args
    assert {name: args[name] for name in PLAIN_ARGUMENTS} == PLAIN_ARGUMENTS
    assert described(args["attention_backend"]) == ("megatron.core.transformer.enums.AttnBackend", (3,))
    assert described(args["model_type"]) == ("megatron.core.enums.ModelType", (1,))
    (dataset,) = args["eval_datasets"]
    assert dataset.kind == "slime.utils.eval_config.EvalDatasetConfig"
    assert dataset.state == {"name": "aime", "path": "/data/aime.jsonl", "top_p": 1.0}
    for name, since, kind, number in (
        ("exit_signal", "0.16", "signal.Signals", 15),
        ("inference_cuda_graph_scope", "0.18", "megatron.core.transformer.enums.InferenceCudaGraphScope", 1),
    ):
        assert (name in args) == (release.name > since)
        assert name not in args or described(args[name]) == (kind, (number,))


def test_common_state_and_training_state_come_back(release):
    checkpoint = TorchDistCheckpoint(release)
    assert (checkpoint.path / "common.pt").exists() == (release.name < "0.19")
    common = checkpoint.common
    assert (common["iteration"], common["checkpoint_version"]) == (7, 3.0)
    assert common["content_metadata"] == {
        "singleton_local_shards": False,
        "distrib_optim_sharding_type": "dp_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "params": [0], "is_expert": False}
    assert common["optimizer"]["param_groups"] == [group]
    kind, (_, number) = described(common["opt_param_scheduler"]["max_lr"])
    assert kind == "numpy._core.multiarray.scalar"
    assert struct.unpack("<d", number.args[0].encode("latin1")) == (1e-4,)
    objects = checkpoint.metadata.objects
    assert {key.partition("._extra_state")[0] for key in objects if "_extra_state" in key} == EXTRA_STATES
    for rank in (0, 1):
        ((state,),) = objects[f"rng_state/shard_0.{rank}_1.2"].object()
        assert (state["random_rng_state"][0], state["np_rng_state"][0]) == (3, "MT19937")
    found = training_state(checkpoint.metadata, common)
    # One first moment of 16 float32 numbers.
    moments = {"bytes": 64, "state": {"exp_avg": 64}, "parameters": {"exp_avg": 16}, "format": "dp_reshardable"}
    assert found["optimizer"] == moments
    assert found["random states"]["objects"] == 2
    assert found["scheduler"] == {"num_steps": 7, "lr_decay_style": "cosine"}


def test_what_megatrons_own_converter_makes_for_fsdp_comes_back_too(tmp_path):
    """`make.py FOLDER CHECKOUT` ran Megatron-LM's converter on the checkpoint of 0.16.1."""
    checkpoint = TorchDistCheckpoint(unpack(ARCHIVES.parent / "megatron_fsdp" / "0.19.2.tar.xz", tmp_path))
    assert checkpoint.metadata.layout == "fsdp_dtensor"
    assert_whole(checkpoint)
    common = checkpoint.common
    assert (common["iteration"], common["checkpoint_version"], checkpoint.args["num_layers"]) == (7, 3.0, 2)
    assert optimizer_state(checkpoint.metadata).by_weight.keys() == {"decoder.final_layernorm.weight"}


def test_plans_of_the_ranks_that_older_torch_leaves_in_the_metadata_are_let_through(copied):
    metadata = pickle.loads((copied / ".metadata").read_bytes())
    plan = create_default_local_save_plan({"weight": torch.zeros(2), "object": io.BytesIO()}, True)
    metadata.all_local_plans = [plan]
    (copied / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse_foreign_names(copied)
    assert len(TorchDistCheckpoint(copied).specs) == len(WEIGHTS)


# What Python 3.11.2 pickles for {"args": Namespace(attention_backend=AttnBackend.unfused, exit_signal=SIGTERM)}.
OF_PYTHON_3_11_2 = (
    b"\x80\x02}q\x00X\x04\x00\x00\x00argsq\x01cargparse\nNamespace\nq\x02)\x81q\x03}q\x04(X\x11\x00\x00\x00"
    b"attention_backendq\x05c__builtin__\ngetattr\nq\x06cmegatron.core.transformer.enums\nAttnBackend\nq\x07"
    b"X\x07\x00\x00\x00unfusedq\x08\x86q\tRq\nX\x0b\x00\x00\x00exit_signalq\x0bcsignal\nSIGTERM\nq\x0cubs."
)


@pytest.mark.parametrize(
    ("written", "instead", "refused"),
    [
        (b"unfused", b"__mro__", "AttnBackend.__mro__"),
        (b"\x07\0\0\0unfused", b"\x03\0\0\0mro", "AttnBackend.mro"),
        (b"csignal\nSIGTERM\n", b"csignal\nraise_signal\n", "signal.raise_signal"),
        (b"cmegatron.core.transformer.enums\nAttnBackend\n", b"cargparse\nNamespace\n", "argparse.Namespace.unfused"),
    ],
)
def test_members_of_enums_named_by_getattr_are_let_through_and_nothing_else(copied, written, instead, refused):
    for content in (OF_PYTHON_3_11_2, OF_PYTHON_3_11_2.replace(written, instead)):
        with zipfile.ZipFile(copied / "common.pt", "w") as archive:
            archive.writestr("archive/data.pkl", content)
        with nullcontext() if content == OF_PYTHON_3_11_2 else pytest.raises(CkptkitError, match=refused):
            refuse_foreign_names(copied)
