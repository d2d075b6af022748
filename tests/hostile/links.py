"""Links that lead out of a checkpoint, in place of every kind of file and folder of it, and those that stay in it."""

import os
import shutil
from functools import partial
from pathlib import Path

from hostile.case import Case

BESIDE = "outside/other.json"
_SHARD = "model-00001-of-00005.safetensors"
_TARGETS = {
    "a file beside the input": lambda root: root.parent / BESIDE,
    "a file beside the input, by a relative path": lambda root: Path(*[".."] * 8, *root.parent.parts[1:], BESIDE),
    "the environment of the process": lambda root: Path("/proc/self/environ"),
    "standard input": lambda root: Path("/proc/self/fd/0"),
    "a file of the system": lambda root: Path("/etc/passwd"),
    "a device": lambda root: Path("/dev/urandom"),
}
# Base, and names that every verb of the base reads or carries, or would.
_FILES = {
    "hf": (
        *("x.json", "README.md", "notes/x.json", "tokenizer.json", "chat_template.jinja", "config.json", _SHARD),
        *("model.safetensors.index.json", "generation_config.json", "additional_chat_templates/tool.jinja"),
    ),
    "int4": ("x.json", "config.json"),
    "megatron": (
        *("hf/x.json", "hf/tokenizer.json", "release/common.pt", "release/.metadata", "release/__0_0.distcp"),
        *("release/x.json", "latest_checkpointed_iteration.txt", "ckptkit.json"),
    ),
    "deltas": ("weight_v000001/x.json", "weight_v000001/model-00000-of-00002.safetensors"),
    "manifest": ("x.json", "tokenizer.json"),
}
_FOLDERS = {
    "hf": ("additional_chat_templates", "figures", "onnx"),
    "megatron": ("hf", "release", "carried"),
    "deltas": ("weight_v000001",),
}


def _linked(name, target, root):
    (root.parent / BESIDE).write_text('{"a secret": 1}')
    file = root / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(target(root))


def _folder(name, root):
    moved = root.parent / "outside" / "folder"
    if (root / name).exists():
        shutil.move(root / name, moved)
    else:
        moved.mkdir()
    (root / name).symlink_to(moved)


def _chain(root):
    _linked("z.json", _TARGETS["a file beside the input"], root)
    (root / "y.json").symlink_to("z.json")
    (root / "x.json").symlink_to("y.json")


def _hidden(name, root):
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("url = https://user:token@example.org")
    (root / "x.json").symlink_to(name)


def _around(target, root):
    (root / "figures").mkdir()
    (root / "figures" / "again").symlink_to(target)


def _in_linked_folder(root):
    """A link that leads out, in a folder that is reached by a link that does not."""
    (root / "figures").mkdir()
    (root / "additional_chat_templates").symlink_to("figures")
    _linked("figures/x.jinja", _TARGETS["a file of the system"], root)


def _as_snapshot(target, root):
    """A snapshot of the hub's cache, with one file that is no blob of its model."""
    cache = root.parent / "outside" / "cache"
    snapshot = cache / "models--org--a" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    shutil.move(root, snapshot)
    for name in ("models--org--a/blobs", "models--org--b/blobs", "models--org--b/snapshots"):
        (cache / name).mkdir(parents=True)
        (cache / name / "abc").write_text("{}")
    (cache / "token").write_text("a secret")
    (snapshot / "x.json").symlink_to(target)
    root.symlink_to(snapshot)


def cases():
    """A link in place of each file and folder, to each target in turn; and the roundabout ones."""
    targets = list(_TARGETS.items())
    number = 0
    for base, names in _FILES.items():
        for name in names:
            for what, target in (targets[number % len(targets)], targets[(number + 2) % len(targets)]):
                said = rf"{name.rpartition('/')[2]} is a link to"
                yield Case(f"{base}: {name} is a link to {what}", base, partial(_linked, name, target), said)
            number += 1
    for base, names in _FOLDERS.items():
        for name in names:
            said = f"{name} is a link to .*outside"
            passing = ("after_delta",)  # which is given the folder itself
            yield Case(f"{base}: {name}/ is a link out", base, partial(_folder, name), said, passing=passing)
    for name in (".git/config", ".netrc", ".cache/token"):
        yield Case(f"link to the hidden {name}", "hf", partial(_hidden, name), "x.json is a link to .*hidden")
    for target in (".", "..", "../..", "../figures"):
        yield Case(f"folder that is {target}", "hf", partial(_around, target), "is a link to")
    yield Case("link to a link out", "hf", _chain, "json is a link to .*outside")
    yield Case("link out of a linked folder", "hf", _in_linked_folder, "x.jinja is a link to /etc/passwd")
    for target in (
        *("../../../token", "../../../models--org--b/blobs/abc", "../../blobs/../../token", "/etc/passwd"),
        *("../../blobs", "../../../models--org--b/snapshots"),
    ):
        made = partial(_as_snapshot, target)
        yield Case(f"snapshot with a link to {target}", "hf", made, r"x\.json is a link to")


def _inside(name, to, root):
    (root / to).parent.mkdir(exist_ok=True)
    os.rename(root / name, root / to)
    (root / name).symlink_to(os.path.relpath(root / to, (root / name).parent))


def _folder_inside(root):
    (root / "figures").mkdir()
    (root / "figures" / "x.png").write_text("x")
    (root / "pictures").symlink_to("figures")


def _argument(root):
    root.rename(root.parent / "outside" / "in")
    root.symlink_to(root.parent / "outside" / "in")


def _snapshot(root):
    """As the hub's client keeps it, reached by a link."""
    home = root.parent / "cache" / "models--org--a"
    snapshot, blobs = home / "snapshots" / "0123", home / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(root.iterdir())):
        file.rename(blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    root.rmdir()
    root.symlink_to(snapshot)


# Base, and what is made of a sound input that stays sound.
SOUND = {
    "file": ("hf", partial(_inside, "tokenizer.json", "files/t.json")),
    "shard": ("hf", partial(_inside, _SHARD, "weights/1")),
    "folder": ("hf", _folder_inside),
    "the argument": ("hf", _argument),
    "snapshot of the hub's cache": ("hf", _snapshot),
    "argument of Megatron": ("megatron", _argument),
    "file of Megatron": ("megatron", partial(_inside, "hf/tokenizer.json", "side/t.json")),
    "iteration": ("megatron", partial(_inside, "release", "weights/first")),
    "what a run keeps beside its iterations": ("megatron", lambda root: (root / "wandb").symlink_to("/etc")),
    "version": ("deltas", partial(_inside, "weight_v000001", "store/1")),
}
