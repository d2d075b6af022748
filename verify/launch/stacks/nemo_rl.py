"""Reads a job of NeMo-RL from its YAML settings.

Source: NeMo-RL `models/megatron/setup.py` (validate_model_paths, setup_model_and_optimizer), `models/policy/utils.py`,
`utils/checkpoint.py`, `algorithms/grpo.py`, as of 2026-08.
- With Megatron, the policy loads `pretrained_checkpoint` if given, else a converted copy of `policy.model_name`.
  NeMo-RL finds the copy by the model's name only, and does not convert again when the model changes.
- `pretrained_checkpoint.format` is `megatron_bridge` (requires run_config.yaml) or `megatron_lm` (metadata.json). The
  path is an iteration, or its parent: then the tracker chooses the iteration, else the last name.
- The run resumes from the last `step_N` of `checkpointing.checkpoint_dir`, even without `checkpointing.enabled`. The
  reference never resumes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptkit.formats.detect import TRACKER, tracker_text
from ckptkit.verify.launch.arguments import LaunchArguments
from ckptkit.verify.launch.job import Job, Launch, Stack, TrainedAdapter
from ckptkit.verify.launch.options.names import settings
from ckptkit.verify.launch.options.speculative import speculation_from_settings
from ckptkit.verify.launch.options.tables import SIZES
from ckptkit.verify.launch.settings.config import Config
from ckptkit.verify.launch.settings.tree import Tree
from ckptkit.verify.launch.sides import ENGINE, LOAD, STEP, Side, iterations_in, path_issue
from ckptkit.verify.launch.stacks.directories import hf_side, teacher_sides
from ckptkit.verify.launch.stacks.sizes import GpuGroup, GpuPlacement, Gpus, ModelSplit, RolloutEngine, Sizes, cite_all

_MODEL = "policy.model_name"
_MEGATRON = "policy.megatron_cfg"
_DTENSOR = "policy.dtensor_cfg"
_GENERATION = "policy.generation"
_OWN_NODES = "on_policy_distillation.non_colocated_teachers"
_MARKS = {"megatron_bridge": "run_config.yaml", "megatron_lm": "metadata.json"}  # files of an iteration, by format
_STATE = "latest_train_state.pt"
_STEP = re.compile(r"step_\d+")
_ELSEWHERE = re.compile(
    r"^policy\.hf_config_overrides\.|^policy\.megatron_cfg\.model_overrides\.|^policy\.draft\.model_name$|"
    r"^value\.model_name$|^policy\.megatron_cfg\.peft\.enabled$"
)
_TEACHERS = re.compile(r"^teacher\.model_name$|^on_policy_distillation\.teacher_model_by_agent_name\.")


def read(launch: Launch) -> Job:
    """The job of a launch. Raises CkptkitError for values that are not numbers or truth values."""
    settings = launch.settings
    settings.report_unchecked(_ELSEWHERE)
    teachers = teacher_sides(settings, _TEACHERS)
    megatron = settings.switch(f"{_MEGATRON}.enabled")
    pretrained = ("checkpointing.pretrained_checkpoint", "policy.pretrained_checkpoint")
    prefix, *_ = (*[one for one in pretrained if not settings.lacks(f"{one}.path")], None)
    if megatron:
        start = _pretrained(settings, prefix) if prefix else _converted(settings)
    else:
        start = hf_side("actor", settings, _MODEL, f"{_MODEL}, without Megatron")
    # DPO always loads a reference, other algorithms for a KL penalty.
    penalty = "reference_policy_kl_penalty"
    has_reference = settings.has(f"dpo.{penalty}") or settings.above_zero(f"loss_fn.{penalty}")
    roles = ["actor", *(["reference"] if has_reference else [])]
    actor = _resume(settings, start, megatron) if start else None
    sides = [actor, *(replace(start, role=role) for role in roles[1:])] if start else []
    # Weights of pretrained_checkpoint may belong to another model than config and tokenizer.
    is_copy = megatron and start is not None and start.kind == "megatron" and not prefix
    engine = _engine(settings)
    sizes, arguments, cuts = None, engine.sizes, list[ModelSplit]()
    if megatron:
        _report_missing(settings, *(f"{_MEGATRON}.{name}" for name in SIZES.values()))
        sizes = Sizes.read(settings, _MEGATRON)
        arguments = sizes.arguments(engine.sizes, settings, _MEGATRON)
    else:
        cuts = [cut for cut in _dtensor(settings, roles) if cut.ranks > 1]
    return Job(
        STACK,
        sides=tuple(filter(None, (*sides, engine.side, *teachers))),
        hf=settings.model(_MODEL),
        hf_option=_MODEL,
        adapter=None if megatron else _adapter(settings.silent_copy()),
        sizes=dict.fromkeys(roles, arguments) | {ENGINE: engine.sizes},
        sharing=(("actor", ENGINE),) if is_copy and actor is start else (),
        placement=GpuPlacement(tuple(_groups(settings, roles, sizes)), cuts=(*cuts, *engine.cuts)),
        speculation=speculation_from_settings(settings, f"{_GENERATION}.vllm_kwargs", engine.sizes.server),
    )


def _adapter(settings: Config) -> TrainedAdapter | None:
    """The adapter of a policy without Megatron. Source: NeMo-RL 7ea279a `dtensor_policy_worker_v2.py`."""
    prefix = f"{_DTENSOR}.lora_cfg"
    if not settings.is_on(f"{prefix}.enabled"):
        return None
    targets = settings.listed(f"{prefix}.target_modules", "all linear layers")
    has_engine = settings.has(f"{_GENERATION}.backend")
    engine = "NeMo-RL merges it into the weights that it sends" if has_engine else "NeMo-RL starts no engine"
    return TrainedAdapter(settings.text(f"{prefix}.dim"), targets, engine, settings.cite(f"{prefix}.enabled"))


def _fits(tree: Mapping[str, Tree]) -> bool:
    policy = tree.get("policy")
    return isinstance(policy, dict) and ("model_name" in policy or "megatron_cfg" in policy or "cluster" in tree)


def _dtensor(settings: Config, roles: Sequence[str]) -> Iterator[ModelSplit]:
    """The tensor parallel ranks of a policy without Megatron."""
    key = f"{_DTENSOR}.tensor_parallel_size"
    ranks = settings.size(key) if settings.switch(f"{_DTENSOR}.enabled") else None
    for role in roles if ranks else ():
        yield ModelSplit(role, "dtensor", ranks or 1, settings.cite(key))


def _pretrained(settings: Config, prefix: str) -> Side | None:
    key = f"{prefix}.path"
    word, layout = settings.get(key).word, settings.get(f"{prefix}.format").word
    if word is None or not settings.get(f"{prefix}.format").known:
        return None
    path, place, format_name = Path(word.text), settings.cite(key), layout.text if layout else ""
    mark = _MARKS.get(format_name)
    if mark is None:
        actual, hint = format_name or "not set", f"set {prefix}.format to one of the two"
        issue = path_issue(place, path, f"{prefix}.format is {' or '.join(_MARKS)}", actual, hint, check=LOAD)
        return Side("actor", None, None, f"NeMo-RL stops: {prefix}.format is {actual}", (issue,))
    iteration, why = _iteration(path, mark)
    if iteration and (iteration / mark).exists():
        return Side("actor", "megatron", iteration, f"{why} of {key}")
    actual = "no such directory" if not path.exists() else f"no {mark} in {iteration or path}"
    other = next((name for name, one in _MARKS.items() if iteration and (iteration / one).exists()), None)
    hint = f"set {prefix}.format={other}, the format of this checkpoint" if other else "check the path"
    issue = path_issue(place, path, f"an iteration with {mark}, which {format_name} requires", actual, hint, check=LOAD)
    return Side("actor", None, None, f"NeMo-RL stops: {actual}", (issue,))


def _iteration(path: Path, mark: str) -> tuple[Path | None, str]:
    """The iteration that NeMo-RL chooses in a directory, and the reason."""
    if (path / mark).exists():
        return path, "the directory"
    if (path / TRACKER).is_file():
        text = tracker_text(path)
        name = text if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else text
        return path / name, f"{name} (by the tracker)"
    names = [name for name in iterations_in(path) if name != "release"]
    return (path / names[-1], f"{names[-1]} (the last one, as there is no tracker)") if names else (None, "")


def _converted(settings: Config) -> Side | None:
    """The HF model, or the copy that NeMo-RL converted before."""
    model = settings.get(_MODEL).word
    if not settings.get(_MODEL).known or model is None:
        return hf_side("actor", settings, _MODEL, "--hf-checkpoint, which NeMo-RL converts at the start")
    folder, home = (settings.environment.get(one, "").strip() for one in ("NRL_MEGATRON_CHECKPOINT_DIR", "HF_HOME"))
    cache = Path(folder) if folder else Path(home or Path.home() / ".cache" / "huggingface") / "nemo_rl"
    name = f"model_{model.text.replace('/', '_')}" if Path(model.text).exists() else model.text
    copy = cache / name / "iter_0000000"
    if not copy.exists() or settings.switch(f"{_MEGATRON}.force_reconvert_from_hf"):
        return hf_side("actor", settings, _MODEL, f"{_MODEL}, which NeMo-RL converts at the start")
    side = Side("actor", "megatron", copy, f"the copy of {_MODEL} that NeMo-RL converted before")
    made = max((path.stat().st_mtime for path in copy.iterdir() if path.is_file()), default=0.0) or math.inf
    files = (path for pattern in ("config.json", "*.safetensors") for path in Path(model.text).glob(pattern))
    if (newer := next((path for path in files if path.stat().st_mtime > made), None)) is None:
        return side
    expected = f"a converted copy ({copy}) that is newer than the model"
    hint = f"set {_MEGATRON}.force_reconvert_from_hf=True, which converts the model again"
    actual = f"{newer.name} is newer, but NeMo-RL loads the copy"
    return replace(side, issues=(path_issue(settings.cite(_MODEL), newer, expected, actual, hint, "warning", LOAD),))


def _resume(settings: Config, start: Side, megatron: bool) -> Side:
    """The actor at its last step, or `start` itself if there is no step."""
    key = "checkpointing.checkpoint_dir"
    word = None if settings.is_new(key) else settings.get(key).word
    root = Path(word.text) if word else None
    steps = sorted(
        (path for path in (root.glob("step_*") if root and root.is_dir() else ()) if _STEP.fullmatch(path.name)),
        key=lambda path: int(path.name[5:]),
    )
    if not steps:
        return start
    weights = steps[-1] / "policy" / "weights"
    if not megatron:
        settings.unread.append(f"{weights}: ckptkit reads weights of Megatron runs only")
        return start
    if not ((weights / _STATE).exists() or (weights / TRACKER).exists()):
        actual = f"{_STATE} is missing, so the run continues at {steps[-1].name} with its initial weights"
        hint = "restore the files of this incomplete save, or move the step elsewhere to use the one before"
        issue = path_issue(settings.cite(key), weights, "the weights of the last step", actual, hint, check=STEP)
        return replace(start, issues=(*start.issues, issue))
    names = [name for name in iterations_in(weights) if name != "release"]
    if names and (weights / names[-1] / ".metadata").exists():
        return Side("actor", "megatron", weights / names[-1], f"{steps[-1].name} is the last of {key}", start.issues)
    hint = "restore the files of this save, or move the step elsewhere to use the one before"
    issue = path_issue(settings.cite(key), weights, "an iteration in torch_dist", "missing", hint, check=STEP)
    return Side("actor", None, None, f"NeMo-RL stops: {weights} contains no iteration", (*start.issues, issue))


def _groups(settings: Config, roles: Sequence[str], sizes: Sizes | None) -> Iterator[GpuGroup]:
    """The GPUs of every role. Training and generation share, or split, the GPUs that reward model and teachers leave.

    A split gives generation complete nodes, or GPUs of the only remaining node. The teacher of distillation and the
    value model share the GPUs of training.

    Source: NeMo-RL 7ea279a `algorithms/grpo.py`, `distillation.py`, `ppo.py` (setup), `opd.py` (TeacherResourceConfig).
    """
    keys = ("cluster.num_nodes", "cluster.gpus_per_node")
    nodes, each = (settings.size(key, None) for key in keys)
    rewards: int | None = 0  # nodes of the reward model, or its GPUs on a single node
    if any(settings.text(key) == "reward_model" for key in settings.names("data") if key.endswith("env_name")):
        rewards = settings.number(f"env.reward_model.resources.{'gpus_per_node' if nodes == 1 else 'num_nodes'}")
    if nodes is None or each is None or rewards is None:
        _report_missing(settings, *keys)
        return
    left = Gpus(nodes * each, f"{settings.cite(keys[0])} {nodes} x {settings.cite(keys[1])} {each}", each)
    if rewards:
        left = left.subtract(rewards if nodes == 1 else rewards * each, "for the reward model")
    for alias in _teachers(settings):
        prefixes = [f"{_OWN_NODES}.teacher_overrides.{alias}", f"{_OWN_NODES}.default_teacher_cfg"]
        names = [settings.first(*(f"{one}.{name}" for one in prefixes)) for name in ("num_nodes", "gpus_per_node")]
        gpus, role = Gpus.read(settings, *names), f"teacher of {alias}"
        if gpus.count is None or gpus.node is None:
            return
        etp = settings.size(settings.first(*(f"{one}.{SIZES['etp']}" for one in (*prefixes, _MEGATRON))), None)
        yield replace(Sizes.read(settings, *prefixes), etp=etp).group(role, gpus)
        if gpus.node > each:
            products = (("gpus_per_node", (gpus.node,)),)
            yield GpuGroup(f"node of the {role}", Gpus(each, settings.cite(keys[1])), products, settings.cite(names[1]))
        left = left.subtract(gpus.count // gpus.node * each, f"for the {role}")
    train = generate = left
    if not settings.switch(f"{_GENERATION}.colocated.enabled", True):
        is_single = (left.count or 0) <= each
        key = f"{_GENERATION}.colocated.resources.{'gpus_per_node' if is_single else 'num_nodes'}"
        if (count := settings.number(key)) is None:
            return
        generate = Gpus(count if is_single else count * each, f"{settings.cite(key)} {count}", each)
        train = left.subtract(generate.count or 0, f"for generation by {generate.source}")
    yield from (sizes.group(role, train) for role in roles if sizes)
    for cut in () if sizes else _dtensor(settings, roles):
        context = settings.size(f"{_DTENSOR}.context_parallel_size") or 1
        yield GpuGroup(cut.role, train, (("tp x cp", (cut.ranks, context)),), cut.asked_by)
    for role, prefix in (("teacher", "teacher.megatron_cfg"), ("critic", "value.megatron_cfg")):
        if settings.switch(f"{prefix}.enabled"):
            yield Sizes.read(settings, prefix).group(role, train)
    yield from _engines(settings, generate, sizes)


def _teachers(settings: Config) -> list[str]:
    """The agents with teachers on separate nodes. Agents with the same teacher are one."""
    opd = "on_policy_distillation"
    if not (settings.switch(f"{opd}.enabled") and settings.switch(f"{_OWN_NODES}.enabled")):
        return []
    models = f"{opd}.teacher_model_by_agent_name"
    aliases = [name.removeprefix(f"{models}.") for name in settings.names(models)]
    if not settings.switch(f"{opd}.deduplicate_shared_teacher_checkpoints", True):
        return aliases
    return list({settings.text(f"{models}.{alias}"): alias for alias in reversed(aliases)}.values())


def _engines(settings: Config, gpus: Gpus, trained: Sizes | None) -> Iterator[GpuGroup]:
    """The divisors of the GPUs of generation.

    Megatron uses the policy's sizes for those that mcore_generation_config does not give, and no context parallelism
    on shared GPUs. vLLM spreads experts over tensor x data parallel ranks, and puts an engine of at most a node inside
    one node. Source: NeMo-RL `models/generation/megatron/config.py`, `models/generation/vllm/vllm_generation.py`.
    """
    backend = settings.text(f"{_GENERATION}.backend")
    if backend == "megatron":
        sizes = Sizes.read(settings, f"{_GENERATION}.mcore_generation_config", _MEGATRON)
        sizes = replace(sizes, cp=1) if settings.switch(f"{_GENERATION}.colocated.enabled", True) else sizes
        yield from [sizes.group(ENGINE, gpus)] if sizes != trained else []
    elif backend:
        keys = _engine_keys(backend)
        tp, pp, ep = (settings.size(one) for one in keys)
        if tp is None or pp is None:
            return
        products, spread = [("tp x pp", (tp, pp))], backend == "vllm" and ep is not None and ep > 1
        if spread and ep and ep % tp:
            where = f"{settings.cite(keys[2])} {ep}"
            yield GpuGroup("expert parallel ranks", Gpus(ep, where), (("tp", (tp,)),), settings.cite(keys[0]))
        elif spread and ep:
            products.append(("ep x pp", (ep, pp)))
        is_inside = backend == "vllm" and tp * pp <= (gpus.node or 0) and len(products) == 1
        yield GpuGroup(ENGINE, gpus, tuple(products), cite_all(settings, keys), is_engine=is_inside)


def _engine_keys(backend: str) -> list[str]:
    """The settings of an engine's tensor, pipeline and expert parallel sizes."""
    vllm = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
    names = ("tp_size", "pp_size", "ep_size") if backend == "sglang" else vllm
    return [f"{_GENERATION}.{backend}_cfg.{name}" for name in names]


def _report_missing(settings: Config, *keys: str) -> None:
    for key in keys:
        if settings.get(key).known and not settings.has(key):
            settings.unread.append(f"{key} is not set, and NeMo-RL has no default for it")


def _engine(settings: Config) -> RolloutEngine:
    """The engine, without its GPUs: see `_engines`."""
    backend = settings.text(f"{_GENERATION}.backend")
    if not backend or backend == "megatron":
        return RolloutEngine(sizes=LaunchArguments(server=backend or None))
    key, why = _MODEL, f"{backend} loads config and tokenizer from {_MODEL}, and the actor sends its weights"
    config = f"{_GENERATION}.{backend}_cfg"
    if backend == "sglang" and settings.has(f"{config}.model_path"):
        key, why = f"{config}.model_path", f"sglang loads {config}.model_path first"
    engine = RolloutEngine(hf_side(ENGINE, settings, key, why), LaunchArguments(server=backend))
    keys = _engine_keys(backend)
    tp, pp, ep = (settings.size(one) for one in keys)
    if tp is None or pp is None:
        return engine
    fp8 = backend == "vllm" and _packs_all(settings)
    return engine.cut(tp, pp, ep, settings.cite(keys[0]), plain=ep is not None, fp8=fp8)


def _packs_all(settings: Config) -> bool:
    """Whether `precision: fp8` packs all Linear layers and experts in FP8 blocks of 128 x 128."""
    prefix = f"{_GENERATION}.vllm_cfg"
    quiet = settings.silent_copy()
    layers = [quiet.text(f"{prefix}.num_{end}_layers_in_bf16", "0") for end in ("first", "last")]
    is_plain = quiet.text(f"{prefix}.precision") == "fp8" and quiet.is_off(f"{prefix}.is_mx")
    return is_plain and layers == ["0", "0"] and not any(settings.names(f"{prefix}.quantization_ignored_layer_kws"))


STACK = Stack(
    "NeMo-RL",
    read,
    partial(settings, "nemo-rl"),
    "NeMo-RL ignores an unknown setting in a file, and stops at one on the command line",
    fits=_fits,
    models=frozenset({_MODEL, f"{_GENERATION}.sglang_cfg.model_path"}),
)
