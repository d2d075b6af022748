"""How training in FP8 and NVFP4 makes its scales, beside how those are made of the weights that an engine is sent.

The trainer's are Transformer Engine's, which variables decide. Where nothing is set, scales of FP8 blocks are powers of
two, and NVFP4 has squares of 16 x 16.

Source: Transformer Engine `common/recipe/__init__.py` (Float8BlockScaling, NVFP4BlockScaling); slime 624b824
`ray/actor_group.py` and miles 31f1ca9 `ray/train/actor_factory.py` (which set a default), their `quantizer_fp8.py` and
miles' `utils/nvfp4.py`; verl 1dda039 `utils/kernel/fp8_kernel.py`; NeMo-RL 7ea279a
`models/generation/vllm/quantization/fp8.py` (cast_tensor_to_fp8_blockwise) and `models/megatron/setup.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.formats.hf.side_files import quantization_of
from verify.launch.options.argv import last, options_of
from verify.launch.rules.settings import Values
from verify.launch.words import LaunchText, UnresolvedWord, Word

BLOCKS, SQUARES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION"
_VERL = "actor_rollout_ref"
_TRANSFORMER = f"{_VERL}.actor.megatron.override_transformer_config"
_MEGATRON, _GENERATION = "policy.megatron_cfg", "policy.generation"
_POWERS = f"{_GENERATION}.vllm_cfg.pow2_weight_scaling_factors"
# Variables of the trainer and of the engine's kernels that choose the same; by the engine's value, the trainer's.
_ACTIVATIONS = {"0": ("none", "weights"), "1": ("all", "activations")}
_PAIRS: Sequence[tuple[str, str, Mapping[str, tuple[str, ...]]]] = (
    ("NVTE_NVFP4_4OVER6", "FLASHINFER_NVFP4_4OVER6", _ACTIVATIONS),
    ("NVTE_NVFP4_4OVER6_E4M3_USE_256", "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", _ACTIVATIONS),
    ("NVTE_NVFP4_4OVER6_ERR_MODE", "FLASHINFER_NVFP4_4OVER6_ERR_MODE", {"mae": ("mae",), "mse": ("mse",)}),
    (
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
        "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION",
        {"0": ("0",), "1": ("1",)},
    ),
)


@dataclass(frozen=True)
class ScaleChoice:
    """A variable of the trainer that decides how scales are made, beside how they are made for the engine.

    word: its value, and where the launch says it; None where it says nothing.
    wanted: the values with which both make them alike; none where the GPU's generation decides. Transformer Engine
        takes what is not set for 0, and of a switch all but 1.
    why: how they are made for the engine.
    """

    variable: str
    word: Word | None
    wanted: tuple[str, ...]
    why: str

    @property
    def agrees(self) -> bool:
        """Whether both make them alike."""
        value = self.word.text.strip().lower() if self.word else "0"
        if set(self.wanted) <= {"0", "1"}:
            value = "1" if value == "1" else "0"
        return value in self.wanted


def scales_of_verl(values: Values, text: LaunchText, *, megatron: bool) -> tuple[ScaleChoice, ...]:
    """FP8 blocks in Megatron and in the rollout: verl sends float32 scales."""
    fp8 = values.text(f"{_TRANSFORMER}.fp8", "")
    blockwise = fp8 not in (None, "", "null", "None") and values.text(f"{_TRANSFORMER}.fp8_recipe") == "blockwise"
    if not (megatron and blockwise and values.text(f"{_VERL}.rollout.quantization") == "fp8"):
        return ()
    return _choice(_in_environment(BLOCKS, values, text), ("1",), "verl sends weights with float32 scales")


def scales_of_nemo_rl(values: Values, text: LaunchText, *, megatron: bool) -> tuple[ScaleChoice, ...]:
    """FP8 blocks in Megatron and in vLLM: NeMo-RL sends powers of two where its settings say so, else float32."""
    fp8, engine = f"{_MEGATRON}.fp8_cfg", f"{_GENERATION}.vllm_cfg"
    trained = values.on(f"{fp8}.enabled") and values.text(f"{fp8}.fp8_recipe") == "blockwise"
    served = values.text(f"{_GENERATION}.backend") == "vllm" and values.text(f"{engine}.precision") == "fp8"
    powers = values.on(_POWERS)
    if not (megatron and trained and served) or values.on(f"{engine}.is_mx") is not False or powers is None:
        return ()
    key = f"{_MEGATRON}.env_vars.{BLOCKS}"
    if not values.off(key) and values.word(key) is None:
        return ()
    word = values.word(key) or _in_environment(BLOCKS, values, text)
    kind = "powers of two" if powers else "float32"
    return _choice(word, ("0" if powers else "1",), f"NeMo-RL sends weights with scales in {kind} ({_POWERS})")


def scales_of_options(
    text: LaunchText, environment: Mapping[str, str], config: Mapping[str, object]
) -> tuple[ScaleChoice, ...]:
    """FP8 blocks and NVFP4 of slime and miles, in Megatron and in an engine of this config.

    Both set a default for FP8 that is right, so that only a launch which says otherwise is looked at.
    """
    options, quantization = options_of(text.words), quantization_of(config)
    if not isinstance(quantization, Mapping):
        return ()
    known = {**{name: Word(value) for name, value in environment.items()}, **text.environment}
    if (given := last(options, "--train-env-vars")) is not None:
        known |= _variables(given.value)
    recipe = last(options, "--fp8-recipe")
    blockwise = recipe is not None and recipe.value is not None and recipe.value.text == "blockwise"
    if blockwise and last(options, "--fp8-format") and quantization.get("quant_method") == "fp8":
        return tuple(_of_blocks(known, quantization))
    if last(options, "--fp4-format") and quantization.get("quant_algo") == "NVFP4":
        return tuple(_of_nvfp4(known))
    return ()


def _of_blocks(known: Mapping[str, Word], quantization: Mapping[str, object]) -> Iterator[ScaleChoice]:
    word = known.get(BLOCKS)
    if word is None or isinstance(word, UnresolvedWord):
        return
    if word.text == "1" and quantization.get("scale_fmt") == "ue8m0":
        why = "updates have float32 scales, although scale_fmt of the checkpoint announces powers of two to the engine"
        yield ScaleChoice(BLOCKS, word, (), why)
    elif word.text != "1":
        why = "training's scales are powers of two, as on Blackwell; on Hopper slime sends float32 scales"
        yield ScaleChoice(BLOCKS, word, (), why)


def _of_nvfp4(known: Mapping[str, Word]) -> Iterator[ScaleChoice]:
    if not isinstance(known.get(SQUARES), UnresolvedWord):
        why = "miles packs weights in rows of 16, Transformer Engine else in squares of 16 x 16"
        yield ScaleChoice(SQUARES, known.get(SQUARES), ("1",), why)
    for name, engines, values in _PAIRS:
        word, other = known.get(name), known.get(engines)
        if word is None or other is None or isinstance(word, UnresolvedWord) or isinstance(other, UnresolvedWord):
            continue
        if wanted := values.get(other.text.strip().lower()):
            yield ScaleChoice(name, word, wanted, f"the engine has {engines}={other.text}")


def _choice(word: Word | None, wanted: tuple[str, ...], why: str) -> tuple[ScaleChoice, ...]:
    return () if isinstance(word, UnresolvedWord) else (ScaleChoice(BLOCKS, word, wanted, why),)


def _in_environment(name: str, values: Values, text: LaunchText) -> Word | None:
    """A variable as the launch sets it, else as it is here."""
    if name in text.environment:
        return text.environment[name]
    return Word(values.environment[name]) if name in values.environment else None


def _variables(value: Word | None) -> dict[str, Word]:
    """Those that `--train-env-vars` gives as JSON; none of what is not known."""
    if value is None or isinstance(value, UnresolvedWord):
        return {}
    try:
        found = json.loads(value.text)
    except (ValueError, RecursionError):
        return {}
    return {str(key): replace(value, text=str(one)) for key, one in found.items()} if isinstance(found, dict) else {}
