"""Every comparison of bits says why it holds on any machine: it is marked `exact`, or no library's sum is in it."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
# Files whose equal bits come from no product of a library: formats and copies, kernels whose order is their own.
NO_PRODUCTS = ("formats/", "kernels/", "bench/", "training/", "evals/")
COPIES = {
    "model/test_checkpoint.py", "model/test_synthetic.py", "plan/test_activations.py", "model/test_upload.py",
    "lab/test_load.py", "lab/measure/test_load.py", "ops/test_attention.py::test_pages_give_back_what_was_written",
    "engine/test_device_runner.py::test_what_is_sent_arrives_aligned_and_typed",
    "engine/test_page_memory.py::test_a_page_is_written_before_the_next_step_and_behind_work_that_uses_it",
    # Elementwise operations, and weights as they are stored and read back.
    "ops/test_folding.py", "ops/test_rope.py", "lab/test_kept_logits.py",
    "engine/test_speculative.py::test_a_borrowed_output_layer_has_no_norm_in_it",
    "model/test_published_files.py::test_vectors_and_routers_keep_their_bits",
    "model/test_published_files.py::test_a_quantised_embedding_keeps_its_precision_on_a_cpu",
    "model/test_variants.py::test_quantised_matrices_do_not_depend_on_how_a_norm_and_its_matrix_share_a_factor",
    "vllm_plugin/test_selection.py::test_norms_move_into_what_is_quantised_inside_vllm",
    # One plan on the same numbers in the same shapes.
    "model/test_published_files.py::test_a_folder_is_served", "model/test_published_files.py::test_a_gguf_is_served",
}  # fmt: skip
EQUAL = {"equal", "array_equal"}


def test_bits_are_compared_in_exact_tests_only() -> None:
    wrong = []
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        text = path.read_text(encoding="utf-8")
        if name.startswith(NO_PRODUCTS) or name in COPIES or "pytestmark = pytest.mark.exact" in text:
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            marks = " ".join(ast.unparse(d) for d in node.decorator_list)
            calls = {
                c.func.attr for c in ast.walk(node) if isinstance(c, ast.Call) and isinstance(c.func, ast.Attribute)
            }
            if calls & EQUAL and "mark.exact" not in marks and f"{name}::{node.name}" not in COPIES:
                wrong.append(f"{name}::{node.name}")
    assert not wrong, "mark them `exact`, or say in this file why no library's sum is in them:\n" + "\n".join(wrong)
