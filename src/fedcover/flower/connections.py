"""The SuperLinks that Flower's configuration names."""

import os
import tomllib
from pathlib import Path
from typing import Any

from fedcover.errors import InvalidValue


def check_connection(name: str | None) -> None:
    """Check that Flower's configuration has an address for a SuperLink; None is the default one.

    Without an address Flower would simulate, and leave a SuperLink of its own running.

    Raises:
        InvalidValue: if there is no such SuperLink, or it has no address.
    """
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink")
    except OSError:
        section = {}
    except ValueError:
        return  # Flower itself reports invalid TOML
    links = section if isinstance(section, dict) else {}
    names = [key for key, link in links.items() if isinstance(link, dict) and _has_address(link)]
    wanted_name = name or links.get("default")
    if wanted_name not in names:
        raise InvalidValue(
            f"connection must be one of {', '.join(names) or '(none yet)'}; got {wanted_name!r}:"
            f" write its address to {path}, under [superlink.{wanted_name or 'NAME'}]"
        )


def _has_address(link: dict[str, Any]) -> bool:
    address = str(link.get("address", ""))
    return bool(address) and not address.startswith(":")  # ":local:" starts a simulation
