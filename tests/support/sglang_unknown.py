"""An SGLang witness rank with a release that does not exist: `python -m support.sglang_unknown JOB.json`.

Its version is 9.9.9, and what the environment variable LACKS names (`module:attribute`) is not in it.
"""

import os
from importlib import import_module

import ckptkit.verify.witnesses.loading.process as process
from ckptkit.verify.witnesses.loading import examine


def main():
    if lacks := os.environ.get("LACKS"):
        module, _, path = lacks.partition(":")
        *owners, name = path.split(".")
        owner = import_module(module)
        for one in owners:
            owner = getattr(owner, one)
        delattr(owner, name)
    examine.version = lambda package: "9.9.9"
    process.main()


if __name__ == "__main__":
    main()
