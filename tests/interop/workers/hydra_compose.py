"""Composes a configuration with each list of overrides: lines of a file of JSON, a line of JSON out for each."""

import json
import sys
import tempfile
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf


def flat(node, key=""):
    if not isinstance(node, dict | list):
        return {key: node}
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    below = [flat(value, f"{key}.{inner}" if key else str(inner)) for inner, value in pairs]
    return {name: value for found in below for name, value in found.items()}


def main():
    text, *lines = Path(sys.argv[1]).read_text().splitlines()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.yaml").write_text(json.loads(text))
        with initialize_config_dir(folder, version_base=None):
            for line in lines:
                try:
                    config = compose("job", overrides=json.loads(line))
                    print(json.dumps(flat(OmegaConf.to_container(config, resolve=True))))
                except Exception as error:  # noqa: BLE001 - what Hydra refuses is an answer
                    print(json.dumps(f"{type(error).__name__}: {str(error).splitlines()[0]}"))


main()
