"""LoRA adapters that PEFT itself makes and saves, for test models."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from families import HF_CASES, case
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.reference.adapter import run
from ckptkit.verify.witnesses.reference.job import NamesReport
from ckptkit.verify.witnesses.runner import Answer

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "dense": ("qwen3-untied", {"target_modules": [*ATTENTION, *MLP]}),
    "patterns": (
        "qwen3-untied",
        {
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"down_proj": 6},
            "alpha_pattern": {r".*\.layers.3.self_attn.q_proj": 32, "down_proj": 9},
        },
    ),
    "rslora": ("qwen3-untied", {"target_modules": ATTENTION, "use_rslora": True}),
    "dora": ("qwen3-untied", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "saved": ("qwen3-untied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "embedding": ("qwen3-untied", {"target_modules": ["embed_tokens", "o_proj"]}),
    "fused experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts one by one": ("qwen3_moe", {"target_modules": MLP}),
    "shared outer": ("qwen3_moe", {"target_modules": ["gate_up_proj", "down_proj"]}),
    "all linear": ("qwen3_moe", {"target_modules": "all-linear"}),
    "mtp": ("glm4_moe-mtp", {"target_modules": ["q_proj", "o_proj"]}),
    "other names": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "nested": ("gemma3", {"target_modules": r".*language_model.*\.(q_proj|down_proj)"}),
}


def answer_here(job, *_):
    """As `ask_meanwhile`, in this process, which has imported PEFT already."""
    answer = Future[Answer[NamesReport]]()
    with TemporaryDirectory() as home:
        report = Path(home) / "report.json"
        try:
            answer.set_result(Answer({0: run(replace(job, report=str(report)), ExitReport(report))}, {}))
        except AttributeError as error:  # what a class of transformers misses in its config
            answer.set_result(Answer({}, {0: ExitReport(report, message=str(error))}))
    return answer


def randomized(model):
    """B begins as zeros, which would merge to nothing."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.requires_grad:
            size = 1.1 if "magnitude" in name else 0.05
            parameter.data = parameter.data * size if "magnitude" in name else torch.randn_like(parameter) * size
        elif "modules_to_save.default" in name:
            parameter.data += 0.1


class _Tree(nn.Module):
    """Linear layers of these weights by their names in the files, where transformers has experts in one tensor."""

    def __init__(self, weights):
        super().__init__()
        for name, weight in weights.items():
            *parents, leaf = name.removesuffix(".weight").split(".")
            module = self
            for part in parents:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            linear = nn.Linear(*reversed(weight.shape), bias=False)
            linear.weight.data.copy_(weight)
            module.add_module(leaf, linear)


def _of_files(kind, path):
    """As `made`, of modules that stand as the files have them. PEFT merges experts one by one alone."""
    stored = {name: one for file in (path / "base").glob("*.safetensors") for name, one in load_file(file).items()}
    weights = {name: one for name, one in stored.items() if ".experts." in name}
    if kind == "shared outer":
        factors = _shared(weights)
        shapes = {name: (one.shape[1], other.shape[2]) for name, (other, one) in factors.items()}
        weights = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tuned = get_peft_model(_Tree(weights), LoraConfig(r=4, lora_alpha=8, **KINDS[kind][1]))
    randomized(tuned)
    if kind == "shared outer":
        for name, pair in factors.items():
            for part, factor in zip("AB", pair, strict=True):
                getattr(tuned.base_model.model.get_submodule(name), f"lora_{part}").default.weight = nn.Parameter(
                    factor
                )
    tuned.save_pretrained(str(path / "adapter"))
    if kind == "shared outer":
        return  # which PEFT does not merge
    whole = stored | tuned.merge_and_unload().state_dict()
    (path / "merged").mkdir()
    save_file({name: one.contiguous() for name, one in whole.items()}, path / "merged" / "model.safetensors")


def _shared(stored):
    """Factors of 12 experts, which share A of gate and up, and B of down."""
    factors = {}
    for block in sorted({name.partition(".experts.")[0] + ".experts" for name in stored}):
        inner, hidden = stored[f"{block}.0.gate_proj.weight"].shape
        one, several = torch.randn(1, 4, hidden) * 0.05, torch.randn(12, 2 * inner, 4) * 0.05
        inputs, output = torch.randn(12, 4, inner) * 0.05, torch.randn(1, hidden, 4) * 0.05
        factors |= {f"{block}.gate_up_proj": (one, several), f"{block}.down_proj": (inputs, output)}
    return factors


def made(kind, path):
    """`base`, an `adapter` for it as PEFT saves it, and what PEFT merges, saved by transformers as `merged`."""
    name, options = KINDS[kind]
    case.save(name, HF_CASES[name], path / "base", torch.float32)
    if kind in ("experts one by one", "shared outer"):
        return _of_files(kind, path)
    model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options))
    randomized(tuned)
    tuned.save_pretrained(str(path / "adapter"))
    again = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
    whole = PeftModel.from_pretrained(again, str(path / "adapter")).merge_and_unload()
    whole.save_pretrained(path / "merged", max_shard_size="100GB")
    return None
