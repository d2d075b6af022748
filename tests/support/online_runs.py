"""Updates real SGLang models online, on the CPU, many in one process.

The model and its `load_weights` are SGLang's own; of the repacking for Marlin only the CUDA kernels are replaced, by
`ckptkit.verify.witnesses.loading.layouts.marlin`.
"""

from functools import partial
from pathlib import Path

import torch

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.online import sglang_reload
from ckptkit.quant.online.quantizer import OnlineQuantizer
from ckptkit.verify.evidence.extremes import as_integers
from ckptkit.verify.witnesses.loading.bits import poison
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin_weight
from support.calls import call


def state(model):
    return {name: as_integers(parameter).clone() for name, parameter in model.named_parameters() if parameter.numel()}


def differing(one, other):
    return [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]


def trainer(path, change=str):
    """Every BF16 tensor alone, each expert's between those of other layers: sorted by the name's last part first."""
    checkpoint = HfCheckpoint(path)
    for name in sorted(checkpoint.specs, key=lambda name: name.split(".")[::-1]):
        yield change(name), checkpoint.read([name])[name]


def swapped(name):
    other = {"layers.3.mlp.experts.4.": "layers.3.mlp.experts.5.", "layers.3.mlp.experts.5.": "layers.3.mlp.experts.4."}
    return next((name.replace(one, two) for one, two in other.items() if one in name), name)


def update(model, online, weights):
    """One update over poisoned parameters. Returns what was loaded, before repacking."""
    sglang_reload.begin(model, [])
    poison(parameter for _, parameter in model.named_parameters())
    for bucket in online.stream(weights):
        model.load_weights(bucket)
    loaded = state(model)
    sglang_reload.end(model, [])
    return loaded


def left_out(model, online, path):
    """An update without one expert, pushed to its end by a trainer that does not ask `finish`. What that says."""
    session = online.begin()
    sglang_reload.begin(model, [])
    for name, tensor in trainer(path):
        for bucket in session.add([(name, tensor)] if "layers.3.mlp.experts.4." not in name else []):
            model.load_weights(bucket)
    sglang_reload.end(model, [])
    return message(session.finish)


def message(call):
    try:
        call()
    except (CkptkitError, RuntimeError, AssertionError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def examine(order, report, model, weights, device):
    """Loads from disk and updates twice with the same weights; then, with "broken", tries what must not work."""
    poison(parameter for _, parameter in model.named_parameters())
    model.load_weights(weights)
    loaded = state(model)
    for module in model.modules():
        if type(getattr(module, "scheme", None)).__name__ == "CompressedTensorsWNA16MoE":
            module.workspace = None
            module.scheme.process_weights_after_loading(module)
    ready = state(model)
    report["parameters"] = len(ready)
    report["repacked"] = sorted(
        {name.rpartition(".")[2] for name in loaded.keys() & ready.keys() if loaded[name].shape != ready[name].shape}
    )
    path = Path(order["bf16"])
    online = OnlineQuantizer(HfCheckpoint(order["int4"]).config, order["int4"])
    report["updates"] = []
    for _ in range(2):
        again = update(model, online, trainer(path))
        report["updates"].append([differing(again, loaded), differing(state(model), ready)])
    if "broken" in order:
        report |= broken(model, online, path, ready)


def broken(model, online, path, ready):
    report = {}
    update(model, online, trainer(path, swapped))
    report["altered"] = sorted(differing(state(model), ready))
    report["left out"] = left_out(model, online, path)
    report["destroyed"] = differing(state(model), ready)
    update(model, online, trainer(path))
    report["mended"] = differing(state(model), ready)
    report["end twice"] = message(lambda: sglang_reload.end(model, []))
    experts = [pair for pair in trainer(path) if "layers.3.mlp.experts" in pair[0]]
    report["without begin"] = message(lambda: model.load_weights(online.quantize(experts)))
    return report


def without_cuda():
    """Marlin's layout, computed here: SGLang's own code around it runs as it is."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as scheme

    scheme.gptq_marlin_moe_repack = lambda words, *_: marlin_experts(words)
    scheme.marlin_make_workspace = lambda *_: torch.zeros(1)


def marlin_experts(words):
    """Of [experts, inputs / 8, outputs] side by side: Marlin's tiles of 64 outputs end where an expert ends."""
    return marlin_weight(words.transpose(0, 1).flatten(1)).unflatten(1, (len(words), -1)).transpose(0, 1).contiguous()


def run(root, orders):
    """A report of each order: `int4` is the directory that is served, `bf16` the trainer's."""
    return call("sglang", _reports, root, orders)


def _reports(root, orders):
    from ckptkit.verify.witnesses.loading.engine import ModelBuild
    from ckptkit.verify.witnesses.process.exit_report import ExitReport
    from ckptkit.verify.witnesses.sglang.adapter import build

    without_cuda()
    reports = {}
    for name, order in orders.items():
        (scratch := root / f"scratch-{name}").mkdir()
        reports[name] = {}
        examined = partial(examine, order, reports[name])
        build(ModelBuild(Path(order["int4"]), scratch), examined, ExitReport(scratch / "report"))
    return reports
