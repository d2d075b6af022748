"""Launch scripts, YAML, logs and words of the command line that are made to run code, to hang or to fill memory."""

from functools import partial

from hostile.case import RAN, Case, put

_TRAIN = "\npython3 train.py --hf-checkpoint in $A\n"
SCRIPTS = {
    "command substitution": f"A=$(touch {RAN}){_TRAIN}".encode(),
    "backquotes": f"A=`touch {RAN}`{_TRAIN}".encode(),
    "process substitution": f"source <(echo 'touch {RAN}'){_TRAIN}".encode(),
    "eval": f"eval 'touch {RAN}'\nA=$X{_TRAIN}".encode(),
    "substitution in arithmetic": f"A=$((a[$(touch {RAN})])){_TRAIN}".encode(),
    "substitution in a default": f"A=${{X:-$(touch {RAN})}}{_TRAIN}".encode(),
    **{
        f"script that starts with {line.partition(' ')[0]}": f"{line}{_TRAIN}".encode()
        for line in (f"touch {RAN}", f"echo x > {RAN}", f"bash -c 'touch {RAN}'", f"trap 'touch {RAN}' EXIT")
    },
    "kernel log": b"source /proc/kmsg" + _TRAIN.encode(),
    "unfinished quote": b"A='x" + _TRAIN.encode(),
    "unfinished here-document": b"cat <<EOF\nA=1" + _TRAIN.encode(),
    "script that reads itself": b"source in/run.sh" + _TRAIN.encode(),
    "function that calls itself": b"f() { f; }\nf" + _TRAIN.encode(),
    "brace bomb": b"A={1..1000000000}" + _TRAIN.encode(),
    "power tower": b"A=$((10**10**10))" + _TRAIN.encode(),
    "array bomb": b"B=(x)\n" + b'B=("${B[@]}" "${B[@]}")\n' * 60 + b"A=${B[*]}" + _TRAIN.encode(),
    "doubling": b"A=xxxxxxxx\n" + b"A=$A$A\n" * 60 + _TRAIN.encode(),
    "endless loop": b"while true; do A=x$A; done" + _TRAIN.encode(),
    "10000 brackets": b"A=" + b"$(" * 10_000 + b"x" + b")" * 10_000 + _TRAIN.encode(),
    "10000 ifs": b"if true; then\n" * 10_000 + _TRAIN.encode() + b"fi\n" * 10_000,
    "line of 900 KB": b"A=" + b"x" * 900_000 + _TRAIN.encode(),
    "2 MB": b"# " + b"x" * 2_000_000 + _TRAIN.encode(),
    "bytes of all values": bytes(range(256)) * 100,
    "UTF-16": "A=1\npython3 train.py --hf-checkpoint in $A\n".encode("utf-16"),
    "pattern in a variable": b"B=" + b"a" * 5000 + b"\nA=${B##" + b"*a" * 30 + b"b}" + _TRAIN.encode(),
    "terminal escapes": b"A=\x1b]0;owned\x07\x1b[2J" + _TRAIN.encode(),
    "sizes of 10^99": b"python3 train.py --hf-checkpoint in --num-layers "
    + b"9" * 99
    + b" --tensor-model-parallel-size 0\n",
}
YAML = {
    "billion laughs": b"a0: &a0 [x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)),
    "python object": f"a: !!python/object/apply:os.system ['touch {RAN}']\n".encode(),
    "merge cycle": b"a: &a\n  <<: *a\n  b: 1\n",
    "list in itself": b"a: &a [*a]\n",
    "nested lists": b"a: " + b"[" * 50_000,
    "deep indentation": b"".join(b" " * n + b"a:\n" for n in range(500)),
    "key twice": b"a: 1\na: 2\n",
    "unknown anchor": b"a: *nowhere\n",
    "NUL": b"a: \0\n",
    "invalid UTF-8": b"a: \xff\xfe\n",
    "100000 keys": b"".join(b"k%d: 1\n" % n for n in range(100_000)),
    "a list": b"- 1\n",
    "interpolation of itself": b"actor_rollout_ref: {model: {path: '${actor_rollout_ref.model.path}'}}\n",
    "interpolation of a resolver": f"actor_rollout_ref: {{model: {{path: '${{oc.eval:touch {RAN}}}'}}}}\n".encode(),
    "defaults outside": b"defaults: [../../../../etc/passwd]\nactor_rollout_ref: {model: {path: in}}\n",
    "defaults of itself": b"defaults: [job]\nactor_rollout_ref: {model: {path: in}}\n",
}
LOGS = {
    "line of 30 MB": b"x" * 30_000_000,
    "bytes of all values": bytes(range(256)) * 10_000,
    "terminal escapes": b"\x1b]0;owned\x07\x1b[2J CUDA out of memory\x1b[31m\n" * 1000,
    "escapes without an end": b"\x1b]" + b"0" * 3_000_000,
    "million empty lines": b"\n" * 1_000_000,
    "UTF-16": ("CUDA out of memory\n" * 1000).encode("utf-16"),
    "a symptom on every line": b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n" * 20_000,
}
CODES = {
    "terminal escapes": "\x1b[2J",
    "100000 characters": "C" * 100_000,
    "a lone surrogate": "CK\udcff",
    "a format": "%s%s%n{0.__class__}",
    "a newline": "CK101\nCK102",
}


def _at(name, content, root):
    put(root / name, content)


def _code(text, root):
    return {"code": text}


def cases():
    """Texts for preflight, triage and explain. What is harmless may pass: the harness judges what was done."""
    for what, content in SCRIPTS.items():
        yield Case(
            f"script: {what}",
            "script",
            partial(_at, "run.sh", content),
            "run.sh|line|hf-checkpoint|train.py|in",
            None,
            ("preflight",),
        )
    for what, content in YAML.items():
        yield Case(f"YAML: {what}", "yaml", partial(_at, "job.yaml", content), r"job\.yaml|model\.path|command line")
    for what, content in LOGS.items():
        yield Case(f"log: {what}", "log", partial(_at, "log.txt", content), r"log\.txt", None, ("triage", "json"))
    for what, text in CODES.items():
        yield Case(f"explain: {what}", "code", partial(_code, text), "code|CK")
