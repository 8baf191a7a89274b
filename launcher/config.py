"""One configuration for a command: defaults in code, one YAML file, `key=value` on the command line; no fourth layer.

The only file that imports omegaconf. What a user typed wrong becomes one ValueError with key, value, rule and remedy.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from data_pipeline.config import DataConfig
from launcher.help_text import spell_type
from prism_lm.model.config import ModelConfig
from prism_lm.model.peer_rules import describe_model
from prism_lm.parallel.apply import ParallelConfig, check_mixers
from prism_lm.train.config import TrainConfig

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a training run; written, resolved, to `config.yaml` in the run folder."""

    run_dir: str
    """Folder of the run: configuration, metrics, checkpoints, result. An existing one is resumed."""
    seed: int = 1234
    """Seed of initial weights and of the order of samples; at least 0."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The language model; `prism sizes` lists the named ones."""
    data: DataConfig = field(default_factory=DataConfig)
    """The prepared token rows it is trained on."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Budget, batch, precision, optimizer, schedule, checkpoints."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """What is put on the model from outside: kernels, rows cut over processes, recomputation, compilation."""

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise ValueError("run_dir= must name a folder; for example run_dir=runs/my_run")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0; for example seed=1234")
        check_mixers(self.model, self.parallel.sequence_degree)


def load_config(config_class: type[ConfigT], path: str | Path | None, overrides: Sequence[str] = ()) -> ConfigT:
    """Merge the class's defaults, one YAML file and `key=value` overrides, in this order, into a checked instance.

    Raises ValueError for a missing file, an unknown key, a value of the wrong type or one that breaks a rule.
    """
    merged: Any = OmegaConf.structured(config_class)
    for typed_key, layer in [("", _read_yaml(path)), *((_key_of(text), _read_override(text)) for text in overrides)]:
        try:
            merged = OmegaConf.merge(merged, layer)
        except (OmegaConfBaseException, TypeError) as error:
            raise ValueError(_explain(error, config_class, typed_key or f"CONFIG={path}")) from error
    try:
        return cast(ConfigT, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error, config_class, f"CONFIG={path}")) from error


def dump_config(config: Any) -> str:
    """The configuration as YAML that `load_config` reads back to an equal instance."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, width=110)


def fingerprint_model(model: ModelConfig) -> str:
    """What a checkpoint holds of the model's settings, so that a run that goes on has the same."""
    text = yaml.safe_dump(_plain(describe_model(model)), sort_keys=False, width=110)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_yaml(path: str | Path | None) -> Any:
    if path is None:
        return {}
    if not Path(path).is_file():
        raise ValueError(f"CONFIG={path} must be an existing YAML file; the shipped ones are in configs/")
    try:
        return OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ValueError(f"CONFIG={path} must be valid YAML; {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        remedy = "turn it into UTF-8, such as with iconv -f LATIN1 -t UTF-8"
        raise ValueError(f"CONFIG={path} must be a text file in UTF-8 ({error}); {remedy}") from error
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"CONFIG={path} must be a YAML file of keys that can be read ({reason}); mend it") from error


def _key_of(override: str) -> str:
    return override.partition("=")[0]


def _read_override(override: str) -> Any:
    if "=" not in override or override.startswith("-"):
        raise ValueError(f"{override} must have the form key=value; for example train.steps=100")
    try:
        return OmegaConf.from_dotlist([override])
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{override} must hold a YAML value; quote special characters ({reason})") from error


def _explain(error: Exception, config_class: type[Any], where: str) -> str:
    """One line in the house's form from omegaconf's message, which spends three more on its own internals."""
    key = getattr(error, "full_key", None) or where
    reason = str(error).splitlines()[0]
    if isinstance(error, ConfigKeyError):
        close = re.findall(r"'(\w+)'", reason.partition("Did you mean")[2])
        advice = f"did you mean {' or '.join(close)}?" if close else "--help lists every key"
        return f"{key} must be a key of this configuration; {advice}"
    if isinstance(error, MissingMandatoryValue):
        return f"{key} must be given; add {key}=VALUE or write it in the YAML file"
    value = re.search(r"[Vv]alue:? '?([^',]*)'?", reason)
    typed = value[1] if value and value[1] != "None" else ""
    return f"{key}={typed} must be {_spell_type_of(config_class, key)}; --help shows every key with its type"


def _spell_type_of(config_class: type[Any], key: str) -> str:
    """What a dotted key holds, as `prism VERB --help` spells it."""
    hint: Any = config_class
    for name in re.findall(r"[^.\[\]]+", key):
        if isinstance(hint, type) and is_dataclass(hint):
            hint = get_type_hints(hint).get(name, hint)
        else:
            hint = get_args(hint)[-1]
    if isinstance(hint, type) and is_dataclass(hint):
        return f"a group of keys such as {key}.{fields(hint)[0].name}"
    return f"{'one of' if get_origin(hint) is Literal else 'of type'} {spell_type(hint)}"


def _plain(value: Any) -> Any:
    """Tuples as lists, so that the YAML holds no Python tags."""
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in cast(dict[Any, Any], value).items()}
        case list() | tuple():
            return [_plain(item) for item in cast(list[Any], value)]
        case _:
            return value
