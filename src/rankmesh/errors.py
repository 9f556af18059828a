"""The exception tree, and the words of an OSError. It owns the classes and their exit codes; it
knows nothing else.

RankmeshError                 anything that this package raises on purpose; exit code 1
|-- UserError                 the user's input is wrong: one line, no traceback; exit code 2
|   |-- PlanError             an impossible parallel plan
|   |-- ConfigError           a key, type or value of a config
|   |-- DataError             a token file, tokenizer or text input
|   `-- CheckpointError       a checkpoint or a Hugging Face folder
|-- MeshError                 start-up, preflight, peers, links
`-- StepError                 a step that must not go on (NaN, infinity)
"""


class RankmeshError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the process ends with."""

    exit_code = 1


class UserError(RankmeshError):
    """The user's input is wrong: what, where, the value, and what is allowed, in one line."""

    exit_code = 2


class PlanError(UserError):
    """A parallel plan whose numbers do not fit each other, the model or the world."""


class ConfigError(UserError):
    """An unknown key, a wrong type or an impossible value in a config or an override."""


class DataError(UserError):
    """A token file, a tokenizer or a text input that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint or a Hugging Face folder that cannot be read or written."""


class MeshError(RankmeshError):
    """Processes, devices or links that cannot work together."""


class StepError(RankmeshError):
    """A training step that must not be applied."""


def reason(error: Exception) -> str:
    """Why a file could not be read or written, without number and path: its reader names them."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
