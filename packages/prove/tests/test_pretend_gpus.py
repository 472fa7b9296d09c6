"""prove --cpu: what a script for GPUs asks of torch.cuda is answered where there is no GPU."""

import os

import torch

from prove_runs import call

CALLS = """
torch.cuda.is_available()
torch.cuda.device_count() == 2
torch.cuda.is_initialized() or torch.cuda.init() is None
torch.cuda.set_device(1) is None and torch.cuda.current_device() == 0
torch.cuda.get_device_name(1)
torch.cuda.get_device_properties(1).total_memory > 0
torch.cuda.get_device_capability() >= (7, 0) and torch.cuda.is_bf16_supported()
torch.cuda.is_tf32_supported()
torch.cuda.get_arch_list() == [] and torch.cuda.get_gencode_flags() == ""
not torch.cuda.can_device_access_peer(0, 1)
torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart()) is None

inside(torch.cuda.device(1)) and inside(torch.cuda.device(torch.device("cuda:1")))
inside(torch.cuda.device_of(x))
inside(torch.cuda.stream(torch.cuda.Stream(1, priority=-1)))
inside(torch.cuda.StreamContext(torch.cuda.default_stream()))
inside(torch.cuda.Stream())
torch.cuda.set_stream(torch.cuda.current_stream(1)) is None
torch.cuda.current_stream().wait_stream(torch.cuda.Stream()) is None
torch.cuda.Stream().wait_event(torch.cuda.Stream().record_event()) is None
torch.cuda.Stream().query() and torch.cuda.Event(enable_timing=True).query()
x.record_stream(torch.cuda.current_stream()) is None
not torch.cuda.is_current_stream_capturing()
torch.cuda.synchronize(1) is None
torch.cuda.make_graphed_callables(torch.neg, (x,)) is torch.neg

free_and_total(torch.cuda.mem_get_info())
torch.cuda.memory_allocated(1) == torch.cuda.max_memory_allocated() == 0
torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == 0
torch.cuda.memory_cached() == torch.cuda.max_memory_cached() == 0
torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
torch.cuda.memory_summary(abbreviated=True) == torch.cuda.list_gpu_processes() == ""
torch.cuda.memory_snapshot() == []
torch.cuda.reset_peak_memory_stats(1) is torch.cuda.reset_accumulated_memory_stats() is None
torch.cuda.reset_max_memory_allocated() is torch.cuda.reset_max_memory_cached() is None
torch.cuda.empty_cache() is torch.cuda.ipc_collect() is None
torch.cuda.set_per_process_memory_fraction(0.5) is None
torch.cuda.get_per_process_memory_fraction() == 1
torch.cuda.memory._record_memory_history(max_entries=9) is None
torch.cuda.memory._dump_snapshot(os.devnull) is None

torch.cuda.manual_seed(1) is torch.cuda.manual_seed_all(1) is None
torch.cuda.seed() is torch.cuda.seed_all() is None
torch.cuda.initial_seed() == torch.initial_seed()
draws_again(torch.cuda.get_rng_state, torch.cuda.set_rng_state)
draws_again(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
len(torch.cuda.get_rng_state_all()) == 2
inside(torch.random.fork_rng()) and inside(torch.random.fork_rng([0, 1]))

torch.cuda.set_sync_debug_mode("warn") is None and torch.cuda.get_sync_debug_mode() == 0
torch.cuda.utilization() == torch.cuda.memory_usage() == torch.cuda.device_memory_used() == 0
torch.cuda.temperature() == torch.cuda.power_draw() == torch.cuda.clock_rate() == 0
torch.cuda.profiler.start() is torch.cuda.profiler.stop() is None
torch.cuda.nvtx.range_push("step") == torch.cuda.nvtx.range_pop() == 0
torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("step")) is None
torch.cuda.nvtx.mark("step") is None and inside(torch.cuda.nvtx.range("step"))

torch.accelerator.current_accelerator().type == "cpu"
torch.accelerator.current_device_index() == 0
torch.accelerator.set_device_index(1) is None and inside(torch.accelerator.device_index(1))
free_and_total(torch.accelerator.get_memory_info())
torch.accelerator.current_stream().wait_stream(torch.cuda.Stream()) is None

torch.cuda.FloatTensor([1, 2]).dtype == torch.float32
x.type(torch.cuda.HalfTensor).dtype == torch.float16
torch.cuda.amp.GradScaler().scale(x).sum() > 2
inside(torch.cuda.amp.autocast()) and torch.cuda.amp.custom_fwd(print)
torch.empty(2, pin_memory=True).pin_memory().cuda(1).device.type == "cpu"
torch.nn.DataParallel(torch.nn.Linear(2, 3), [0, 1]).cuda()(torch.ones(4, 2)).shape == (4, 3)
torch.nn.Linear(2, 3, device="cuda:1").to(1).weight.device.type == "cpu"
"""
NEED_A_GPU = ("device(1)", "Stream()", "mem_get_info", "get_rng_state_all", ".init()", "cudart")


def inside(context) -> bool:
    with context:
        return True


def free_and_total(memory) -> bool:
    free, total = memory
    return 0 < free <= total


def draws_again(get, put) -> bool:
    state = get()
    first = torch.rand(3)
    put(state)
    return torch.equal(first, torch.rand(3))


def failing_calls(pretends: bool) -> list[str]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if pretends:
        from prove.watch import pretend_gpus

        pretend_gpus.install(2)
    names = globals() | {"x": torch.ones(2)}
    failing = []
    for line in filter(None, CALLS.splitlines()):
        try:
            assert eval(line, names)  # noqa: S307
        except Exception as error:
            failing.append(f"{line}: {error!r}")
    return failing


def test_what_a_script_asks_of_its_gpus_is_answered_on_a_cpu():
    """The control: without pretending, calls that need a GPU fail."""
    assert call(failing_calls, True) == []
    failing = call(failing_calls, False)
    for needed in NEED_A_GPU:
        assert any(needed in failed.partition(": ")[0] for failed in failing), needed
