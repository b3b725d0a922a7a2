"""What all sections of the configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Keys of a YAML: unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
