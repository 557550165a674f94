"""Every module that registers measurements, in the order of README's table. A test looks for one that is missing."""

from __future__ import annotations

import importlib

from bench.measurement import MEASUREMENTS

MODULES = (
    "bench.engine.commands",
    "bench.engine.serving",
    "bench.engine.bursts",
    "bench.kernels.decode",
    "bench.engine.load",
    "bench.checks.sanitizer",
    "bench.checks.stress",
    "bench.checks.embedded",
    "bench.checks.variant_answers",
    "bench.checks.variant_quality",
    "bench.engine.host",
    "bench.engine.server",
    "bench.engine.prompt_path",
    "bench.engine.training",
    "bench.checks.teacher_forced",
    "bench.checks.verification",
    "bench.checks.one_function",
    "bench.checks.schedules",
    "bench.checks.soak",
    "bench.checks.faults",
    "bench.engine.engine_steps",
    "bench.engine.mixed_steps",
    "bench.engine.sessions",
    "bench.engine.profile",
    "bench.engine.speculation",
    "bench.engine.user_path",
    "bench.engine.prefixes",
    "bench.engine.experts_in_host",
    "bench.kernels.batch",
    "bench.kernels.batch_steps",
    "bench.kernels.prefill_products",
    "bench.kernels.prefill_layers",
    "bench.kernels.flash_attention",
    "bench.kernels.sampling",
    "bench.kernels.triton_phases",
    "bench.kernels.sm12x",
    "bench.kernels.cpu_step",
    "bench.kernels.cpu_amx",
    "bench.experiments.rehearsal",
    "bench.experiments.eagle_acceptance",
    "bench.experiments.two_trees",
    "bench.experiments.tile_loop",
    "bench.experiments.one_stream",
    "bench.peers.llamacpp",
    "bench.peers.second_instrument",
    "bench.leaderboard",
    "bench.vllm.compare",
    "bench.vllm.pack",
    "bench.packages.aarch64",
)


def load() -> None:
    """Registers all of them, in this order whatever was imported before."""
    for name in MODULES:
        importlib.import_module(name)
    ordered = sorted(MEASUREMENTS.items(), key=lambda item: MODULES.index(item[1].module))
    MEASUREMENTS.clear()
    MEASUREMENTS.update(ordered)
