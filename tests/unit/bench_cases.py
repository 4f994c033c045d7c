"""Suites' real files, cut down to what runs at once, and how tests run them."""

from pixelrag.bench.rows import Row
from pixelrag.bench.suite import SUITES, load_plan

# The suites' real files, cut down to what runs at once; every suite that runs in this process.
TINY = {
    "kd-chunk": [
        "--work.tokens=24", "--work.student_width=8", "--work.teacher_width=16",
        "--work.vocabularies=40", "--work.chunk_sizes=4,auto", "--work.dtypes=fp32",
    ],
    "gradcache": [
        "--work.batches=4", "--work.chunks=2", "--work.tokens=6", "--work.image_side=32",
        "--work.precision=fp32", "--text.vocab_size=50", "--text.hidden_size=32",
        "--text.num_layers=1", "--text.num_heads=2", "--text.num_kv_heads=1", "--text.head_dim=16",
        "--text.intermediate_size=16", "--vision.depth=2", "--vision.hidden_size=16",
        "--vision.num_heads=2", "--vision.intermediate_size=16",
    ],
    "packing": ["--work.samples=6", "--work.row_length=32", "--work.rows=2", "--work.chunk_size=8"],
    "attention": ["--work.row_length=16", "--work.documents=1,4"],
    "data": ["--work.samples=6", "--work.batch=3", "--work.tokens=24", "--work.row_length=32",
             "--work.image_side=32", "--work.workers=0"],
}  # fmt: skip
for _section, _suite in [("student", "packing"), ("teacher", "packing"), ("student", "attention")]:
    TINY[_suite] += [
        f"--{_section}.{option}"
        for option in (
            "vocab_size=50", "hidden_size=32", "num_layers=1", "num_heads=2", "num_kv_heads=1",
            "head_dim=16", "intermediate_size=16",
        )
    ]  # fmt: skip
    TINY[_suite] += ["--work.precision=fp32"]
ONCE = ["--run.device=cpu", "--run.rounds=1", "--run.warmup=1", "--run.memory=false"]


def measured(name: str, profile: str, *flags: str) -> list[Row]:
    plan = load_plan(name, profile, [*TINY[name], *ONCE, *flags])
    measure = SUITES[name].workload().measure
    return [row for group in plan.groups() for row in measure(plan.config, group)]
