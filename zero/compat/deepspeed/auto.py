"""Importing this module, before anything else, makes `import deepspeed` find the alias, here and in children."""

from __future__ import annotations

from zero.compat.deepspeed import activate

activate()
