"""What vLLM's own code answers in its environment, where `python -m support.vllm_answers QUESTION FILE` asks it.

FILE has the words of the question and gets the answer, both as JSON. `ask` starts it.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from ckptkit.verify.witnesses.process.interpreter import python_of
from support.processes import end_now, run_logged

PAIR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def ask(question, words, folder):
    file, log = folder / "asked.json", folder / "log"
    file.write_text(json.dumps(words))
    done = run_logged(log, "support.vllm_answers", question, file, program=python_of("vllm", {}), limit_s=840)
    assert done, log.read_text()[-3000:]
    return json.loads(file.read_text())


def of_lists(method, content, layers):
    """What `get_quant_method` of a method's config, with its list of unquantized modules, answers for each layer.

    `layers`: by name, each with the parts that vLLM fuses in it. An answer is "packs", "keeps" or "refuses".
    """
    fused = {
        name.rpartition(".")[2]: [part.rpartition(".")[2] for part in parts] for name, parts in layers.items() if parts
    }
    if method == "quark":
        return {name: in_quark(name, content["exclude"], fused) for name in layers}
    config = config_of(method, content)
    config.packed_modules_mapping = fused
    return {name: answer_of_class(method, config, name) for name in layers}


def in_quark(name, exclude, fused):
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

    try:
        ignored = should_ignore_layer(
            name, ignore=exclude, fused_mapping=fused, check_children=name.endswith(".experts")
        )
    except ValueError:
        return "refuses"
    return "keeps" if ignored else "packs"


def config_of(method, content):
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    classes = {
        "fp8": Fp8Config,
        "mxfp8": modelopt.ModelOptMxFp8Config,
        "modelopt fp8": modelopt.ModelOptFp8Config,
        "modelopt fp4": modelopt.ModelOptNvFp4Config,
    }
    return classes[method].from_config(dict(content))


def answer_of_class(method, config, name):
    """Asks the config about a layer of the class that vLLM builds under this name."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import fp8, modelopt
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    kind = RoutedExperts if name.endswith(".experts") else ParallelLMHead if name == "lm_head" else LinearBase
    layer = kind.__new__(kind)
    object.__setattr__(layer, "moe_config", None)
    packed = SimpleNamespace(backend="", marlin_input_dtype=None)
    dense = UnquantizedLinearMethod()
    for key in ("FusedMoEMethodCls", "LinearMethodCls"):
        object.__setattr__(config, key, lambda *_, **__: packed)
    stand_ins = [
        patch.object(fp8, "Fp8LinearMethod", lambda *_, **__: packed),
        patch.object(fp8, "Fp8MoEMethod", lambda *_, **__: packed),
        patch.object(fp8, "UnquantizedFusedMoEMethod", lambda *_, **__: dense),
        patch.object(modelopt, "build_linear_method", lambda *_, **__: packed, create=True),
    ]
    for one in stand_ins:
        one.start()
    try:
        found = config.get_quant_method(layer, name)
    except ValueError:
        return "refuses"
    finally:
        patch.stopall()
    return "packs" if found is packed else "keeps"


def asked_of(path):
    """The layers that vLLM's class asks about while it is built."""
    from ckptkit.verify.witnesses.loading.engine import ModelBuild
    from ckptkit.verify.witnesses.process.exit_report import ExitReport
    from ckptkit.verify.witnesses.vllm import adapter, platform

    scratch = Path(tempfile.mkdtemp())
    platform.choose_platform(scratch)
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    asked = {}
    own = CompressedTensorsConfig.get_quant_method

    def recorded(config, layer, prefix):
        if isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            asked[prefix] = (layer, config)
        return own(config, layer, prefix)

    with patch.object(CompressedTensorsConfig, "get_quant_method", recorded):
        adapter.build(ModelBuild(path, scratch), lambda *_: None, ExitReport(scratch / "report"))
    return asked


def of_model(path, contents):
    """What each config of quantization makes of each layer that the class of this model asks about."""
    asked, found = asked_of(Path(path)), []  # first: it gives vLLM its platform
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    for content in contents:
        config = CompressedTensorsConfig.from_config(dict(content))
        found.append({name: answer(name, layer, own, config) for name, (layer, own) in asked.items()})
    return found


def answer(name, layer, own, config):
    """What a config makes of a layer; of experts by the three names that `get_moe_method` asks about."""
    config.packed_modules_mapping = own.packed_modules_mapping
    experts = name.endswith(".experts")
    if experts:
        config._add_fused_moe_to_target_scheme_map()
    names = [f"{name}.0.{one}_proj" for one in ("gate", "up", "down")] if experts else [name]
    try:
        packs = {config.get_scheme_dict(layer, one) is not None for one in names}
    except ValueError:
        return "refuses"
    return "refuses" if len(packs) > 1 else "packs" if packs.pop() else "keeps"


def of_adapters(name):
    """What the name of a pair becomes that was trained on the language model alone, in the class of this name."""
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.model_executor.models.registry import ModelRegistry

    model = ModelRegistry.models[name].load_model_cls()
    return parse_fine_tuned_lora_name(PAIR, getattr(model, "hf_to_vllm_mapper", None))[0]


QUESTIONS = {"lists": of_lists, "model": of_model, "adapters": of_adapters}

if __name__ == "__main__":
    asked, file = QUESTIONS[sys.argv[1]], Path(sys.argv[2])
    file.write_text(json.dumps([asked(*words) for words in json.loads(file.read_text())]))
    end_now()
