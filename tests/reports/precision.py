"""Reports about low-precision files: modules packed against the list, scales left behind, lists in other names."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from mutations.edits import names, rename, replace, tensor
from mutations.int4 import packed
from support.floats import SPELLINGS, write
from torch import Tensor

from ckptkit.app.api import quantize
from ckptkit.formats.hf.reader import HfCheckpoint
from quant.formats.dequantize import dequantized
from quant.formats.scheme import QuantScheme
from reports.files import number_files, on_checkpoint
from reports.lists import exclude
from reports.other_formats import GPTQ
from reports.quantized import VERIFY, quantization
from reports.report import SOURCE, Case, Change

_FP8 = re.compile(
    r"(.*language_model|mtp)\.layers\..*((self_attn|mlp)\.\w+_proj|linear_attn\.(in_proj_(qkv|z)|out_proj))\.weight"
)
DRAFTS = "mtp.layers.0"
_READ = re.compile(r".*language_model\.layers\..*(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.weight")


def _int4(*ignore: str) -> Change:
    return lambda work: quantize(work / SOURCE, work / "CKPT", QuantScheme(32, "qmax7", ignore))


def _drafts_packed(path: Path) -> None:
    modules = [name.removesuffix(".weight") for name in names(path, DRAFTS) if name.endswith("_proj.weight")]
    packed(modules)(path, "")


def _quark_nvfp4(work: Path) -> None:
    write(
        (work / SOURCE).resolve(),
        work / "CKPT",
        SPELLINGS["nvfp4-quark"],
        lambda name: name.endswith("_proj.weight") and "layers.12." not in name,
    )
    quantization(lambda content: content["exclude"].append(r"re:model\.(layers\.12|decoder)\..*"))(work)


def _not_excluded(content: dict[str, Any]) -> None:
    content["exclude"] = ["lm_head"]


def _visual_kept(work: Path) -> None:
    """NVFP4 of the language model; the tower stands in the list."""
    write(
        (work / SOURCE).resolve(),
        work / "CKPT",
        SPELLINGS["nvfp4-modelopt"],
        lambda name: _READ.fullmatch(name) is not None,
    )
    exclude(lambda listed: [*listed, "model.visual*", "mtp*", "*linear_attn*"])(work)


def _visual_packed(work: Path) -> None:
    """The tower's MLP too, whose sizes no kernel's tile divides."""
    path = work / "CKPT"
    store, new = SPELLINGS["nvfp4-modelopt"].store, dict[str, Tensor]()
    for name in names(path, "visual.blocks"):
        if re.search(r"mlp\.linear_fc\d\.weight", name) and tensor(path, name).shape[1] % 16 == 0:
            new |= store(name.removesuffix(".weight"), tensor(path, name))
    assert new
    replace(path, new)
    exclude(lambda listed: [one for one in listed if "visual" not in one])(work)


def _fp8(work: Path) -> None:
    """FP8 blocks, the MTP layer too, as Qwen3.8-27B-FP8 has it."""
    write((work / SOURCE).resolve(), work / "CKPT", SPELLINGS["fp8"], lambda name: _FP8.fullmatch(name) is not None)
    quantization(
        lambda content: content.update(modules_to_not_convert=["lm_head", "model.visual", "mtp.fc", *_linear()])
    )(work)


def _linear() -> list[str]:
    kept = ("in_proj_a", "in_proj_b", "conv1d")
    return [f"model.language_model.layers.{layer}.linear_attn.{part}" for layer in range(12) for part in kept]


def _without_scales(path: Path) -> None:
    """The writer consumed the scales of what it then left as it was."""
    replace(path, {}, [name for name in names(path, "weight_scale_inv") if name.startswith("mtp.")])
    number_files(path)


def _plain_of(spelling: str) -> Change:
    """What a low-precision release means in BF16; RELEASE is that release."""

    def prepare(work: Path) -> None:
        plain = (work / SOURCE).resolve()
        (work / SOURCE).unlink()
        write(plain, work / SOURCE, SPELLINGS[spelling])
        shutil.copytree(plain, work / "CKPT")
        view = dequantized(HfCheckpoint(work / SOURCE), spelling)
        stored = [name for name in names(work / "CKPT", "_proj.weight") if name in view.specs]
        replace(work / "CKPT", dict(view.read(stored)))

    return prepare


def _bytes_as_numbers(work: Path) -> None:
    """Exponents multiplied as the numbers that their bytes are."""
    path, new = work / "CKPT", dict[str, Tensor]()
    for name in names(work / SOURCE, ".weight_scale_inv"):
        weight = name.removesuffix("_scale_inv")
        codes, scale = tensor(work / SOURCE, weight), tensor(work / SOURCE, name)
        new[weight] = (codes.float().unflatten(-1, (-1, 32)) * scale.float().unsqueeze(-1)).flatten(1).bfloat16()
    replace(path, new)


_CHANNEL = SPELLINGS["fp8-channel"]
_TEXT = re.compile(r".*language_model\.layers\..*(self_attn|mlp)\.\w+_proj\.weight")


def _gemma_fp8(work: Path) -> None:
    """FP8 a channel of attention and dense MLPs; router, experts and towers stand in the list."""
    write((work / SOURCE).resolve(), work / "CKPT", _CHANNEL, lambda name: _TEXT.fullmatch(name) is not None)
    left = ["re:.*router.*", "re:.*vision_tower.*", "re:.*embed_vision.*", "re:.*experts.*"]
    quantization(lambda content: content["ignore"].extend(left))(work)


def _routers_fp8(work: Path) -> None:
    path, new = work / "CKPT", dict[str, Tensor]()
    for name in [*names(path, "router.proj.weight"), *names(path, "embed_vision.embedding_projection.weight")]:
        new |= _CHANNEL.store(name.removesuffix(".weight"), tensor(path, name))
    replace(path, new)
    quantization(lambda content: content.update(ignore=["lm_head", "re:.*vision_tower.*", "re:.*experts.*"]))(work)


def _listed_by_projection(work: Path) -> None:
    """NVFP4 of experts; the list has each projection of attention under its own name."""
    write(
        (work / SOURCE).resolve(),
        work / "CKPT",
        SPELLINGS["nvfp4-modelopt"],
        lambda name: ".mlp." in name and name.endswith("_proj.weight"),
    )


def _with_recipe(work: Path) -> None:
    """A recipe of patterns beside the list of names that they became."""
    write(
        (work / SOURCE).resolve(),
        work / "CKPT",
        SPELLINGS["nvfp4-compressed"],
        lambda name: _TEXT.fullmatch(name) is not None,
    )
    own = [name.removesuffix(".weight") for name in names(work / "CKPT", "router.proj.weight")]
    towers = ["re:.*vision_tower.*", "re:.*embed_vision.*", "re:.*experts.*"]
    quantization(lambda content: content["ignore"].extend([*own, *towers]))(work)
    (work / "CKPT" / "recipe.yaml").write_text(
        "default_stage:\n  default_modifiers:\n    QuantizationModifier:\n      targets: [Linear]\n"
        "      ignore: ['re:.*router', 're:.*vision_tower.*', lm_head]\n      scheme: NVFP4\n"
    )


def _kimi_nvfp4(work: Path) -> None:
    write(
        (work / SOURCE).resolve(),
        work / "CKPT",
        SPELLINGS["nvfp4-modelopt"],
        lambda name: ".experts." in name and name.endswith("_proj.weight"),
    )


def _kimi_short(work: Path) -> None:
    """Names without `.model`, in files and list."""
    _kimi_nvfp4(work)
    rename(work / "CKPT", lambda name: name.replace("language_model.model.layers.", "language_model.layers."))
    exclude(lambda listed: [one.replace("language_model.model.layers.", "language_model.layers.") for one in listed])(
        work
    )


def _with_zero_points(work: Path) -> None:
    """INT4 of experts in groups of 128, with zero points, for vLLM."""
    scheme = QuantScheme(128, "minmax", ("re:.*self_attn.*",), symmetric=False)
    quantize(work / SOURCE, work / "CKPT", scheme, readers=("vllm",))


CASES = {
    "compressed-tensors#712": Case(
        "qwen3_5-tiles/", ("mtp.layers.0",), on_checkpoint(_drafts_packed), _int4("re:mtp.*")
    ),
    "vllm#49187": Case("glm4_moe/", ("layers.12",), quantization(_not_excluded), _quark_nvfp4),
    "Model-Optimizer#1687": Case(
        "qwen3_5/", ("model.visual.blocks.{0..1}.mlp.linear_fc1.weight",), _visual_packed, _visual_kept
    ),
    "imp#1450": Case("qwen3_5/", ("mtp.layers.0",), on_checkpoint(_without_scales), _fp8),
    "omlx#2159": Case("qwen2-untied/", ("_proj.weight", "root mean square"), _bytes_as_numbers, _plain_of("mxfp8")),
    "llm-compressor#2714": Case("gemma4/", ("router.proj.weight", "the router unquantized"), _routers_fp8, _gemma_fp8),
    "auto-round#1660": Case("qwen3_moe/hf", ("quantized format of AWQ or AutoRound",), prepare=GPTQ),
    "sglang#36596": Case("qwen3_moe/", prepare=_listed_by_projection),
    "imp#1970": Case("gemma4/", prepare=_with_recipe),
    "sglang#18370": Case("kimi_k25/", ("language_model.layers.*, which engines rename",), prepare=_kimi_short),
    "sglang#39510": Case(
        "qwen3_moe-tiles/",
        ("[rows / 8, groups]", "mlp.experts.{0..11}.gate_proj.weight_zero_point"),
        prepare=_with_zero_points,
        twin=f"{VERIFY} --reader vllm",
    ),
}
