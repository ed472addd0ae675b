"""Parts of models, saved, with other words in their headers."""

import json

import safetensors.torch


def with_header(path, **changes):
    """The same file with other words in the experiment of its header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fedcover"])
    about |= {name: changes.pop(name) for name in list(changes) if name not in about["experiment"]}
    about["experiment"] |= changes
    values = safetensors.torch.load(content)
    path.write_bytes(safetensors.torch.save(values, metadata={"fedcover": json.dumps(about)}))
    return path
