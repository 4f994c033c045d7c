"""`pixelrag teacher`: serves the teacher of a configuration to training jobs elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from pixelrag.config.distill import DistillConfig
from pixelrag.distributed.env import World, read_ranks
from pixelrag.errors import ConfigError
from pixelrag.models.causal_load import load_tokenizer, student_source
from pixelrag.models.state_codec import Codec, codec_of
from pixelrag.models.teacher import load_teacher
from pixelrag.models.teacher_channel import Greeting, TeacherServer, token_for
from pixelrag.models.wire import is_path
from pixelrag.train.distill_models import agree_on_models
from pixelrag.train.job import world_of


def main(config: DistillConfig, own: Mapping[str, str]) -> int:
    """Serve until interrupted; returns the exit code.

    Args:
        config: the training job's configuration, with `teacher.source` live.
        own: `listen`, a Unix socket's path or host:port; `codec`, exact (default) or int8.

    Raises:
        ConfigError: an argument is missing or out of its range, an address of TCP has no token,
            or several processes were started.
    """
    codec = codec_of(own)
    if not own.get("listen"):
        raise ConfigError("--listen: got nothing, expected a socket's path or host:port")
    port = own["listen"].rpartition(":")[2]
    if not is_path(own["listen"]) and int(port) > 65535:
        raise ConfigError(f"--listen: got port {port}, expected 0 to 65535")
    token_for(own["listen"])
    if config.teacher.source != "live":
        raise ConfigError(f"teacher.source: got {config.teacher.source}, expected live")
    _, world_size, _ = read_ranks()
    if world_size > 1:
        raise ConfigError(f"got {world_size} processes, expected one to serve a teacher")
    with world_of(config) as world:
        server = build_server(config, world, own["listen"], codec)
        try:
            server.serve()
        finally:
            server.close()
    return 0


def build_server(config: DistillConfig, world: World, address: str, codec: Codec) -> TeacherServer:
    """Load and try the teacher, and listen."""
    source = student_source(config.student)
    tokenizer = load_tokenizer(source, trust_remote_code=config.student.trust_remote_code)
    contract = agree_on_models(config, tokenizer)
    teacher = load_teacher(config.teacher, world, precision=config.engine.precision)
    # What is held out is seen sample by sample, however the run sees its training rows.
    held_out = bool(config.data.eval or config.data.eval_samples)
    isolated = config.packing.attention == "isolated" or held_out
    teacher.self_test(contract.vocab_size, isolated=isolated)
    greeting = Greeting(
        teacher=config.teacher.name_or_path or "",
        dtype=str(teacher.model.dtype).removeprefix("torch."),
        vocab_size=contract.vocab_size,
        vocabulary=contract.vocabulary,
        codec=codec,
        isolated=isolated,
        logit_scale=teacher.head.logit_scale,
        soft_cap=teacher.head.soft_cap,
    )
    return TeacherServer(teacher, greeting, address)
