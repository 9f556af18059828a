"""Optional packages: which file of ours owns each, loaded when a choice asks for it.

It must not know what the packages do, and imports none of them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from rankmesh.errors import DataError

# Choice -> (module of ours that owns the package, the package, which is also the extra's name).
_OWNERS = {
    "tokenizer.json": ("rankmesh.data.hf_tokenizer", "tokenizers"),
    ".zst": ("rankmesh.data.zst", "zstandard"),
    ".parquet": ("rankmesh.data.parquet", "pyarrow"),
}


def load_extra(choice: str) -> ModuleType:
    """The owner of the package that `choice` needs. Raises DataError if that is not installed."""
    module, package = _OWNERS[choice]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise DataError(
            f"a {choice} needs the package {package!r}: pip install 'rankmesh[{package}]'"
        ) from None
