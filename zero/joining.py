"""From torch.distributed's ranks to an engine's exchange."""

from __future__ import annotations

import torch

from offload.streams import open_streams
from zero.comm import Comm
from zero.config import Config
from zero.exchange import Alone, Collectives, Exchange
from zero.placement import place


def open_exchange(config: Config, device: torch.device) -> Exchange:
    """What the engine of a configuration exchanges with other ranks. All ranks come here.

    Args:
        config: validated for the number of ranks.
        device: where units are computed on.

    Raises:
        ConfigError: a group that the configuration asks for cannot be made of the ranks.
    """
    comm = Comm(device, open_streams(device))
    placement = place(config, comm.rank, comm.world_size)
    if placement.alone:
        comm.close()
        return Alone(placement)
    return Collectives(comm, placement)
