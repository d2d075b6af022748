"""Reads a job of verl from its Hydra settings.

Source: verl `workers/engine/megatron/transformer_impl.py`, `workers/engine_workers.py`, `trainer/ppo/` (need_critic,
need_reference_policy, _load_checkpoint), `utils/checkpoint/` and the YAML files of `trainer/config/`, as of 2026-08.
- The actor loads `model.path` through a bridge, or, with `use_dist_checkpointing`, the torch_dist directory
  `dist_checkpointing_path`, without a tracker.
- The reference exists for a KL term only. It inherits the actor's sizes, but not `use_dist_checkpointing`.
- The rollout engine has config and tokenizer from `model.path`, its weights from the actor (`load_format: dummy`).
- `resume_mode: auto` follows the tracker of `default_local_dir` to `global_step_N`. If either is missing, the run
  silently starts from the beginning. Source: `trainer/ppo/ray_trainer.py` (_load_checkpoint).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.formats.detect import TRACKER, tracker_text
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.arguments import LaunchArguments, Server
from ckptkit.verify.launch.job import Job, Launch, Stack, TrainedAdapter
from ckptkit.verify.launch.options.speculative import Speculation, speculation_from_settings
from ckptkit.verify.launch.options.tables import MEGATRON_SIZES
from ckptkit.verify.launch.settings.config import Config
from ckptkit.verify.launch.settings.tree import Tree
from ckptkit.verify.launch.sides import ENGINE, LOAD, REF, STEP, PathIssue, Side, path_issue
from ckptkit.verify.launch.stacks.directories import hf_side, is_set, teacher_sides, torch_dist_side
from ckptkit.verify.launch.stacks.sizes import GpuGroup, GpuPlacement, Gpus, ModelSplit, RolloutEngine, Sizes, cite_all

_AR = "actor_rollout_ref"
_MODEL = f"{_AR}.model.path"
_CRITIC_MODEL = "critic.model.path"
_RANKS = (f"{_AR}.model.lora.rank", f"{_AR}.model.lora_rank")  # of an adapter, by the new and the old name
# The keys of the model and of the Megatron settings of each role, and the check of its path.
_ROLES = {
    "actor": (_MODEL, f"{_AR}.actor.megatron", LOAD),
    "reference": (_MODEL, f"{_AR}.ref.megatron", REF),
    "critic": (_CRITIC_MODEL, "critic.megatron", LOAD),
}
_ELSEWHERE = re.compile(  # settings that change a model, or load another one, and are not read
    r"^(?:actor_rollout_ref|critic)\.model\.(?:lora_adapter_path|lora\.adapter_path|hf_config_path|override_config\.model)|"
    r"\.dist_checkpointing_prefix$|\.override_mcore_model_config\.|"
    r"\.override_transformer_config\.(?:num_layers|mtp_num_layers|hidden_size|ffn_hidden_size|num_attention_heads|"
    r"num_query_groups|kv_channels|num_moe_experts|moe_ffn_hidden_size|moe_router_topk|vocab_size)$|"
    r"^trainer\.default_hdfs_dir$|load_checkpoint_path$"
)
_TEACHERS = re.compile(r"^distillation\..*model_path$")
# Folders of verl's own files, of which `folder=file` chooses one.
GROUPS = frozenset({"actor", "critic", "data", "engine", "model", "optim", "ref", "reward", "rollout"})
_MAIN_PPO = re.compile(r"(?:verl\.trainer\.)?main_ppo(?:_v0)?(?:\.py)?")  # has known rules for its settings
OWN = re.compile(  # files of verl itself, with its default settings
    r"(?:(?:fully_async_|one_step_off_)?ppo(?:_megatron)?_trainer|megatron_(?:actor|critic|ref)|dp_(?:actor|critic|ref)|rollout|hf_model|actor|"
    r"critic|ref|megatron|fsdp|automodel|veomni|torchtitan|legacy_data|algorithm|rollout_correction|reward|reward_manager|reward_model|"
    r"megatron_reward_loop|dp_reward_loop|distillation|transfer_queue|profiler|legacy_reward_impl|"
    r"\$\{model_engine\}_(?:actor|critic|ref))(?:\.yaml)?"
)


def read(launch: Launch) -> Job:
    """The job of a launch. Raises CkptkitError for values that are not numbers or truth values."""
    settings = launch.settings
    megatron = _is_megatron(settings)
    roles = ["actor", *(["reference"] if _reference(settings) else []), *(["critic"] if _critic(settings) else [])]
    gpus = Gpus.read(settings, "trainer.nnodes", "trainer.n_gpus_per_node")
    # The reference inherits the actor's sizes.
    prefixes = {role: (_ROLES[role][1], *([f"{_AR}.actor.megatron"] * (role == "reference"))) for role in roles}
    megatron_sizes = {role: Sizes.read(settings, *prefixes[role]) for role in roles if megatron}
    groups = [size.group(role, gpus) for role, size in megatron_sizes.items()]
    cuts = () if megatron else tuple(_sequence_cuts(settings, roles))
    groups += [cut.group(gpus, "ulysses_sequence_parallel_size") for cut in cuts]
    first = {role: _initial(settings, role, megatron) for role in roles}
    resumed = resumed_step(settings)
    sides = [_resume(settings, resumed, role, side, megatron) for role, side in first.items() if side]
    engine = _rollout(settings, gpus)
    sizes = dict.fromkeys((*roles, ENGINE), engine.sizes)
    for role, size in megatron_sizes.items():
        sizes[role] = size.arguments(engine.sizes, settings, f"{prefixes[role][-1]}.override_transformer_config")
    differences = tuple(_size_differences(settings, roles)) if megatron else ()
    settings.report_unchecked(_ELSEWHERE)
    teachers = teacher_sides(settings, _TEACHERS)
    _notes(settings, roles)
    # At the start of a run Megatron weights are those of `model.path` too.
    actor = first["actor"]
    sharing = [("actor", "reference")] if actor and first.get("reference") else []
    sharing += [("actor", ENGINE)] if actor and actor.kind == "megatron" else []
    return Job(
        STACK,
        sides=tuple(filter(None, (*sides, engine.side, *teachers))),
        hf=settings.model(_MODEL) if settings.get(_MODEL).known else None,
        hf_option=_MODEL,
        models={"critic": settings.model(_CRITIC_MODEL)} if "critic" in roles else {},
        sizes=sizes,
        sharing=() if resumed.path else tuple(sharing),
        placement=GpuPlacement((*groups, *engine.groups), differences, (*cuts, *engine.cuts)),
        speculation=_speculation(settings.silent_copy(), engine.server),
        adapter=_adapter(settings.silent_copy()),
        combinations=_combinations(launch, settings.silent_copy(), megatron),
    )


def _combinations(launch: Launch, settings: Config, megatron: bool) -> tuple[Issue, ...] | None:
    """Settings of main_ppo that conflict, or None for another program, which may read them differently.

    Source: verl 1dda039 `workers/rollout/`, where TensorRT-LLM has no adapter; `trainer/ppo/ray_trainer.py`
    (_save_checkpoint) and `utils/checkpoint/megatron_checkpoint_manager.py`: only Megatron's asynchronous save writes a
    tracker.
    """
    program = launch.text.program_name
    if program and not _MAIN_PPO.fullmatch(program):
        return None
    key, mode, issues = f"{_AR}.actor.checkpoint.async_save", "trainer.resume_mode", list(_adapter_issues(settings))
    if not megatron and settings.is_on(key) and settings.get(mode).known and settings.text(mode, "auto") == "auto":
        hint = f"remove {key}: with FSDP no tracker is written, so the next run starts from step 0"
        issues.append(settings.issue((key,), f"{key}=False without Megatron", hint, "warning"))
    return tuple(issues)


def _adapter_issues(settings: Config) -> Iterator[Issue]:
    key, merge = f"{_AR}.rollout.name", f"{_AR}.model.lora.merge"
    rank = next((one for one in _RANKS if settings.text(one) not in ("", "0")), None)
    if rank and settings.text(key) == "trtllm" and settings.is_off(merge):
        expected = f"{key} = vllm or sglang, or {merge} = True, since {rank} is set"
        hint = f"choose another engine or merge: verl sends no adapter to {settings.text(key)}, which serves the base"
        yield settings.issue((rank, key), expected, hint)
    switch = f"{_AR}.rollout.engine_kwargs.{settings.text(key) or 'vllm'}.enable_lora"
    trains = (*_RANKS, f"{_AR}.model.lora_adapter_path")
    if settings.is_on(switch) and all(settings.get(one).known for one in trains) and not _has_adapter(settings):
        hint = f"remove {switch}: verl sends complete weights to an engine with LoRA layers"
        yield settings.issue((switch, _RANKS[1]), f"both {_RANKS[1]} and {switch}, or neither", hint)


def _adapter(settings: Config) -> TrainedAdapter | None:
    """The adapter. Source: verl 1dda039 `vllm_async_server.py`, `async_sglang_server.py` (lora_served_as_adapter)."""
    path, merge = f"{_AR}.model.lora_adapter_path", f"{_AR}.model.lora.merge"
    if not _has_adapter(settings):
        return None
    rank = next((key for key in _RANKS if settings.above_zero(key)), None)
    engine = settings.text(f"{_AR}.rollout.name") or "the engine"
    engine = f"verl sends it unmerged to {engine}, which has enable_lora and a sufficient max_lora_rank"
    engine = "verl merges it into the weights that it sends" if settings.is_on(merge) else engine
    targets = settings.first(f"{_AR}.model.lora.target_modules.0", f"{_AR}.model.target_modules").removesuffix(".0")
    text = settings.text(rank) if rank else ""
    return TrainedAdapter(text, settings.listed(targets, "all-linear"), engine, settings.cite(rank or path))


def _speculation(settings: Config, server: Server | None) -> Speculation | None:
    """Source: verl `workers/config/model.py` (MtpConfig), `vllm_async_server.py`, `async_sglang_server.py`."""
    mtp = f"{_AR}.model.mtp"
    if server and settings.switch(f"{mtp}.enable") and settings.switch(f"{mtp}.enable_rollout"):
        sglang = settings.text(f"{mtp}.speculative_algorithm", "EAGLE").upper()
        method = settings.text(f"{mtp}.method", "mtp") if server == "vllm" else sglang
        return Speculation(server, method, settings.cite(f"{mtp}.enable_rollout"))
    return speculation_from_settings(settings, f"{_AR}.rollout.engine_kwargs.vllm", server)


def _sequence_cuts(settings: Config, roles: Sequence[str]) -> Iterator[ModelSplit]:
    """The ranks that share a sequence in a trainer without Megatron. The reference inherits the actor's size."""
    actor = (f"{_AR}.actor.ulysses_sequence_parallel_size", f"{_AR}.actor.fsdp_config.ulysses_sequence_parallel_size")
    keys = {
        "actor": actor,
        "reference": (f"{_AR}.ref.ulysses_sequence_parallel_size", *actor),
        "critic": ("critic.ulysses_sequence_parallel_size", "critic.fsdp.ulysses_sequence_parallel_size"),
    }
    for role in roles:
        yield from ModelSplit.ulysses(settings, role, *keys[role])


def _is_megatron(settings: Config) -> bool:
    """Whether Megatron trains: by the strategy, else by the names of settings files, or a setting of Megatron."""
    strategy = settings.text(f"{_AR}.actor.strategy") or settings.text("model_engine")
    if strategy:
        return strategy == "megatron"
    is_named = any("megatron" in name for name in (*settings.files, *(word.text for word in settings.groups)))
    return is_named or any(key.startswith(f"{_AR}.actor.megatron.") for key in settings.names())


def _has_adapter(settings: Config) -> bool:
    """Whether an adapter is trained. The reference is then the actor without it."""
    return any(settings.above_zero(key) for key in _RANKS) or is_set(settings.text(f"{_AR}.model.lora_adapter_path"))


def _reference(settings: Config) -> bool:
    switches = (f"{_AR}.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    return any(settings.switch(key) for key in switches) and not _has_adapter(settings)


def _critic(settings: Config) -> bool:
    """Whether there is a critic: by `critic.enable`, else for `gae`, or a critic's model without an estimator."""
    if settings.has("critic.enable"):
        return settings.switch("critic.enable")
    estimator = settings.text("algorithm.adv_estimator")
    return estimator == "gae" or (not estimator and settings.has(_CRITIC_MODEL))


def _notes(settings: Config, roles: Sequence[str]) -> None:
    if "reference" not in roles and settings.has(f"{_AR}.ref.megatron.dist_checkpointing_path"):
        why = "neither use_kl_loss nor use_kl_in_reward is set"
        why = "the reference is the actor without its adapter" if _has_adapter(settings) else why
        settings.notes.append(f"the run loads no reference: {why}")
    if not settings.text("algorithm.adv_estimator") and "critic" not in roles:
        settings.notes.append(f"algorithm.adv_estimator is not set: verl's default, gae, also loads {_CRITIC_MODEL}")
    key = f"{_AR}.actor.megatron.use_mbridge"
    if settings.has(key) and not settings.switch(key):
        settings.notes.append(f"{settings.cite(key)} is false, at which verl stops: it loads only through a bridge")


def _initial(settings: Config, role: str, megatron: bool) -> Side | None:
    """The side of a role at the start of a run."""
    model, prefix, check = _ROLES[role]
    if not megatron:
        return hf_side(role, settings, model, f"{model}, without Megatron")
    switch, key = f"{prefix}.use_dist_checkpointing", f"{prefix}.dist_checkpointing_path"
    word = settings.get(key).word
    if not (settings.get(switch).known and settings.get(key).known):
        return None
    if settings.switch(switch):
        if word is None:
            expected, actual, hint = f"a value of {key}", f"{key} is not set", f"set {key}"
            issue = path_issue(settings.cite(switch), Path(), expected, actual, hint, check=check)
            return Side(role, None, None, f"verl stops: {key} is not set", (issue,))
        return torch_dist_side(role, settings.cite(key), Path(word.text), f"verl loads the directory of {key}", check)
    side = hf_side(role, settings, model, f"{model}, through a bridge")
    if word is None or side is None:
        return side
    actual = f"{switch} is not set, so verl ignores this path and loads {model}"
    hint = f"set {switch}=True, or remove the path"
    issue = path_issue(settings.cite(key), Path(word.text), f"{switch}=True", actual, hint, "warning", check)
    return replace(side, issues=(*side.issues, issue))


def _resume(settings: Config, resumed: Resumed, role: str, side: Side, megatron: bool) -> Side:
    """A side of the resumed run: actor and critic load their part of the step."""
    if role == "reference":
        return side
    if resumed.stops:
        return Side(role, None, None, resumed.why, (*side.issues, *resumed.issues))
    if resumed.path is None:
        return replace(side, why=f"{side.why}; {resumed.why}", issues=(*side.issues, *resumed.issues))
    root = resumed.path / role
    if not megatron:
        settings.unread.append(f"{root}: ckptkit does not read shards of FSDP")
        return side
    key = f"{_ROLES[role][1]}.use_dist_checkpointing"
    name = "dist_ckpt" if settings.switch(key) else "huggingface"
    is_nested, is_hf = (root / "model").is_dir(), name == "huggingface"
    path = root / "model" / name if is_nested else root / name
    layout = "" if is_nested else " (in an old layout, which verl of 2026 recommends to migrate)"
    if (path / ("config.json" if is_hf else ".metadata")).exists():
        return Side(role, "hf" if is_hf else "megatron", path, f"{resumed.why}{layout}", side.issues)
    actual = "no such directory" if not path.exists() else "the directory has no checkpoint"
    expected, hint = f"weights of the {role} for this step", f"choose another step, or change {key}"
    issue = path_issue("trainer.resume_mode", path, expected, actual, hint, check=STEP)
    return Side(role, None, None, f"verl stops: {path} contains no checkpoint", (*side.issues, issue))


def _size_differences(settings: Config, roles: Sequence[str]) -> Iterator[Issue]:
    """Sizes of reference and critic that Megatron ignores, as it makes its groups once, for the first role."""
    for role in roles[1:]:
        for short, name in MEGATRON_SIZES.items():
            key, actor_key = f"{_ROLES[role][1]}.{name}", f"{_AR}.actor.megatron.{name}"
            default = None if short in ("etp", "vpp") else 1
            if not settings.has(key) and role == "reference":
                continue
            size, actor_size = settings.size(key, default), settings.size(actor_key, default)
            if settings.get(key).known and settings.get(actor_key).known and size != actor_size:
                expected, actual = f"{settings.cite(actor_key)} = {actor_size}", f"{settings.cite(key)} = {size}"
                hint = "set both to the same size: roles in one process share the process groups of the first"
                yield Issue(expected, actual, hint, severity="warning")


def _rollout(settings: Config, gpus: Gpus) -> RolloutEngine:
    """The engine. Source: verl `workers/rollout/replica.py`, which assigns the workers of a replica node by node."""
    separate = "rollout.nnodes", "rollout.n_gpus_per_node"  # for fully_async_policy and one_step_off_policy
    if any(settings.has(key) or not settings.get(key).known for key in separate):
        gpus = Gpus.read(settings, *separate)
    prefix = f"{_AR}.rollout"
    name = settings.text(f"{prefix}.name")
    dummy = "dummy" in settings.text(f"{prefix}.load_format", "dummy")
    weights = "config and tokenizer" if dummy else "config, tokenizer and first weights"
    why = f"{name or 'the engine'} loads {weights} from {_MODEL}{', and the actor sends the weights' * dummy}"
    engine = RolloutEngine(hf_side(ENGINE, settings, _MODEL, why), LaunchArguments(server=name or None))
    keys = [f"{prefix}.{one}_size" for one in ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")]
    tp, dp, pp = settings.size(keys[0], 2), settings.size(keys[1]), settings.size(keys[2])
    if tp is None or dp is None or pp is None:
        return engine
    ep_key = f"{prefix}.expert_parallel_size"
    ep, fp8 = settings.size(ep_key, None), settings.text(f"{prefix}.quantization") == "fp8"
    group = GpuGroup(ENGINE, gpus, (("tp x dp x pp", (tp, dp, pp)),), cite_all(settings, keys), is_engine=True)
    engine = replace(engine, groups=(replace(group, is_inside=name == "vllm" and dp > 1),))
    return engine.cut(tp, pp, ep, settings.cite(keys[0]), plain=dp == 1 and settings.get(ep_key).known, fp8=fp8)


STACK = Stack("verl", read, fits=lambda tree: _AR in tree, models=frozenset({_MODEL}), own=OWN, groups=GROUPS)


@dataclass(frozen=True)
class Resumed:
    """The step that a run resumes from, or the reason why it starts from the beginning."""

    path: Path | None
    why: str
    issues: tuple[PathIssue, ...] = ()
    stops: bool = False


def resumed_step(settings: Config) -> Resumed:
    """The step that a run resumes from, by its settings and existing files."""
    mode = settings.text("trainer.resume_mode", "auto")
    if mode == "resume_path":
        return _resumed_path(settings)
    if mode != "auto":
        return Resumed(None, f"trainer.resume_mode is {mode}")
    key = "trainer.default_local_dir"
    project, experiment = "trainer.project_name", "trainer.experiment_name"
    is_given = settings.is_new(key) or not settings.get(key).known or settings.has(key)
    if new := next((one for one in ([key] if is_given else [project, experiment]) if settings.is_new(one)), None):
        return Resumed(None, f"{new} contains the start time, so its directory is new")
    if not settings.get(key).known:
        return Resumed(None, f"the value of {key} is unknown")
    names = [] if is_given else [settings.text(project, "verl_examples"), settings.text(experiment, "gsm8k")]
    root = Path(settings.text(key) or "/".join(["checkpoints", *names]))
    place, steps = settings.cite(key), _steps(root)
    if not (root / TRACKER).is_file():
        if not steps:
            return Resumed(None, f"resume_mode auto finds no tracker in {root}")
        actual = f"{', '.join(steps)} without a tracker, so verl silently starts from the beginning"
        hint = f"write the number of a step into {root / TRACKER}, or set trainer.resume_mode=resume_path"
        issue = path_issue(place, root, f"{TRACKER} next to the steps", actual, hint, check=LOAD)
        return Resumed(None, f"resume_mode auto finds no tracker in {root}", (issue,))
    named = tracker_text(root)
    if not (named.isdecimal() and len(named) < 10):
        hint = "write the number of an existing step"
        issue = path_issue(place, root / TRACKER, "the number of a step", f"{named!r}", hint, check=LOAD)
        return Resumed(None, f"verl stops: {root / TRACKER} contains {named!r}", (issue,), stops=True)
    path = root / f"global_step_{int(named)}"
    if path.exists():
        return Resumed(path, f"the tracker of {key} names {path.name}")
    actual = f"only {', '.join(steps) or 'no step'} exists, so verl silently starts from the beginning"
    hint = "write the number of an existing step into the tracker"
    issue = path_issue(place, root / TRACKER, f"{path.name}, which the tracker names", actual, hint, check=STEP)
    return Resumed(None, f"the tracker names step {named}, but {path.name} is missing", (issue,))


def _resumed_path(settings: Config) -> Resumed:
    key = "trainer.resume_from_path"
    word = settings.get(key).word
    if not settings.get(key).known:
        return Resumed(None, f"the value of {key} is unknown")
    path = Path(word.text) if word else Path()
    if word and "global_step_" in word.text and path.name.rpartition("global_step_")[2].isdecimal() and path.is_dir():
        return Resumed(path, key)
    actual = f"missing; its parent has {', '.join(_steps(path.parent)) or 'no step'}"
    actual = "not set" if word is None else "the directory has another name" if path.is_dir() else actual
    expected, hint = "an existing directory global_step_N", "choose an existing step"
    issue = path_issue(settings.cite(key), path, expected, actual, hint, check=STEP)
    return Resumed(None, f"verl stops: {key} {path} is not a step of a run", (issue,), stops=True)


def _steps(root: Path) -> list[str]:
    names = [path.name for path in root.glob("global_step_*")] if root.is_dir() else []
    return sorted(names, key=lambda name: (len(name), name))


_SFT_MODEL = "model.path"
_SEQUENCE = ("engine.ulysses_sequence_parallel_size", "engine.ulysses_parallel_size")  # of fsdp and veomni
_SFT_ELSEWHERE = re.compile(
    r"^model\.(?:lora_adapter_path|hf_config_path|override_config)|\.override_mcore_model_config\."
)


def read_sft(launch: Launch) -> Job:
    """The job of fine-tuning, without a rollout. Raises CkptkitError for values that are not numbers or truth values.

    Source: verl `trainer/sft_trainer.py`, `utils/checkpoint/checkpoint_handler.py` and `trainer/config/`.
    """
    settings, ranks = launch.settings, launch.text.ranks
    is_chosen = any(word.text.startswith("engine") and "megatron" in word.text for word in settings.groups)
    megatron = is_chosen or settings.text("engine.strategy") == "megatron"
    key = "engine.dist_checkpointing_path"
    word = settings.get(key).word
    if megatron and settings.switch("engine.use_dist_checkpointing") and word:
        side: Side | None = torch_dist_side("actor", settings.cite(key), Path(word.text), key, LOAD)
    else:
        side = hf_side("actor", settings, _SFT_MODEL, f"{_SFT_MODEL}, through a bridge" if megatron else _SFT_MODEL)
    if settings.text("trainer.resume_mode", "auto") != "disable":
        word = settings.get(settings.first("trainer.resume_from_path", "trainer.default_local_dir")).word
        if word and ((Path(word.text) / TRACKER).is_file() or "global_step_" in word.text):
            settings.unread.append(f"{word.place}: {word.text}: ckptkit does not read the resumed step")
    settings.report_unchecked(_SFT_ELSEWHERE)
    sizes = Sizes.read(settings, "engine") if megatron else None
    gpus = Gpus(int(ranks.text), f"processes started at {ranks.place}") if ranks else Gpus()
    cuts = () if sizes else tuple(ModelSplit.ulysses(settings, "actor", *_SEQUENCE))
    groups = [cut.group(gpus, "ulysses_parallel_size") for cut in cuts] or [GpuGroup("actor", gpus, (("1", (1,)),))]
    groups = [sizes.group("actor", gpus)] if sizes else groups
    return Job(
        SFT,
        sides=(side,) if side else (),
        hf=settings.model(_SFT_MODEL),
        hf_option=_SFT_MODEL,
        sizes={"actor": sizes.arguments(LaunchArguments(), settings, "engine")} if sizes else {},
        placement=GpuPlacement(tuple(groups), cuts=cuts),
    )


def _fits_sft(tree: Mapping[str, Tree]) -> bool:
    model = tree.get("model")
    return isinstance(model, dict) and "path" in model and {"data", "trainer"} <= tree.keys()


SFT = replace(STACK, read=read_sft, fits=_fits_sft, models=frozenset({_SFT_MODEL}))
