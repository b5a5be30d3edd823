"""The silent rank is the one whose stack is not like the others'."""

from __future__ import annotations

import faulthandler
import re
import tempfile

from finlm.launch import watch

WAITS = (("/v/torch/distributed/distributed_c10d.py", 9, "all_reduce"), ("/r/code/finlm/train/pretrain.py", 67, "main"))
READS = (("/r/code/finlm/rows/shards.py", 5, "read"), ("/r/code/finlm/train/pretrain.py", 61, "main"))


def test_a_real_dump_is_read_to_the_main_threads_stack() -> None:
    with tempfile.TemporaryFile("w+") as file:
        file.write("step 3\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0, 2)
        file.write("step 4\n")
        file.seek(0)
        text = file.read()
    stack = watch.parse_stack(text)
    assert stack[0][2] == "test_a_real_dump_is_read_to_the_main_threads_stack"
    assert re.search(r"test_stacks.py:\d+ in test_a_real", watch.format_stack(stack))
    assert watch.parse_stack("no dump here\n") == ()


def test_the_odd_one_out_is_silent() -> None:
    assert watch.silent_ranks({0: WAITS, 1: READS}, {}) == [1]
    assert watch.silent_ranks({0: WAITS, 1: WAITS, 2: READS, 3: WAITS}, {}) == [2]
    elsewhere = (("/v/torch/_tensor.py", 1, "item"), ("/r/code/finlm/train/zero/checkpoint.py", 3, "save"))
    item = (("/v/torch/_tensor.py", 1, "item"), ("/r/code/finlm/train/pretrain.py", 150, "log_step"))
    assert watch.silent_ranks({0: item, 1: elsewhere, 2: item}, {}) == [1]


def test_a_rank_without_an_answer_or_stopped_is_silent_and_equal_stacks_blame_nobody() -> None:
    assert watch.silent_ranks({0: WAITS, 1: ()}, {}) == [1]
    assert watch.silent_ranks({0: (), 1: ()}, {1: "T"}) == [1]
    assert watch.silent_ranks({0: WAITS, 1: WAITS}, {0: "S", 1: "S"}) == []
