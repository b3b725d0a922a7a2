"""Reads what a gateway needs of the folder of its model."""

from __future__ import annotations

import asyncio

from shoal_cluster.config import ClusterConfig
from shoal_cluster.serve.request_maker import RequestMaker
from shoal_replica.checkpoint import ensure_checkpoint
from shoal_replica.grammars import Grammars
from shoal_replica.model_config import ModelConfig
from shoal_replica.tokenizer import Tokenizer


async def read_model(config: ClusterConfig) -> tuple[ModelConfig, Tokenizer, RequestMaker]:
    """The model's config and tokenizer, and what makes requests for it. The folder is fetched if it is a hub id."""
    folder, settings = await asyncio.to_thread(ensure_checkpoint, config.model), config.replica
    model = ModelConfig.from_folder(folder, settings.dtype, settings.max_model_len, settings.quantization)
    tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
    grammars = Grammars(model)
    await asyncio.to_thread(grammars.load)
    return model, tokenizer, RequestMaker(model, tokenizer, grammars, config.sampling_defaults(folder))
