"""Scripts that stop and go on: each was counted, and prove still judges three of them the same."""

import json

import pytest

from evidence.reported_page import load
from evidence.resume_oracle import known_scripts
from evidence.resumed import SCRIPTS, judge_resumed, resumed_scripts
from evidence.run_prove import RIGHT
from prove_runs import TORCHRUN, run, verdict

SELECTED = ("trainer_snapshot", "mid_epoch/skipped_in_the_loop", "dcp")
FAULTS = ("trainer_snapshot/momentum_not_saved", "mid_epoch/position_lost", "dcp/weights_alone")


@pytest.mark.parametrize("folder", sorted(SCRIPTS.iterdir()), ids=lambda folder: folder.name)
def test_each_diff_has_an_entry_that_says_what_it_is(folder):
    about = json.loads((folder / "about.json").read_text())
    entries = {**about["faults"], **about["right"]}
    assert len(entries) == len(about["faults"]) + len(about["right"])
    assert {file.stem for file in folder.glob("*.diff")} <= {*entries}
    without_diff = {*entries} - {file.stem for file in folder.glob("*.diff")}
    assert all({"resume", "options", "resumed_by"} & {*entries[name]} for name in without_diff)
    assert len(about["faults"]) >= 2
    for sentence in [
        about["shows"],
        *(fault["mistake"] for fault in about["faults"].values()),
        *(right["why"] for right in about["right"].values()),
    ]:
        assert sentence.endswith(".")


def test_each_script_was_counted():
    assert {*resumed_scripts()} == {*load("resume")["cases"]}
    assert {*known_scripts()} == {*load("resume_oracle")["cases"]}


def test_without_prove_each_script_was_as_its_entry_says():
    """No right script changes by a stop, and no outcome differs from what was expected."""
    counted = load("resume_oracle")["cases"]
    assert not [name for name, case in counted.items() if "expected" in case["outcome"]]
    rights = [name for name, each in known_scripts().items() if each.changes == "nothing"]
    assert {counted[name]["outcome"] for name in rights} == {"a stop changes nothing"}


@pytest.mark.parametrize("name", [*SELECTED, *FAULTS])
def test_prove_repeats_the_verdicts_that_were_counted(name):
    judged, counted = judge_resumed(name), load("resume")["cases"][name]
    assert judged.outcome == counted["outcome"]
    expected = "proven" if resumed_scripts()[name].verdict == RIGHT else "found as WRONG"
    assert judged.outcome == expected


READS_ONCE_MORE = """
import copy, os, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
average, begin = copy.deepcopy(net), 0
optimizer = torch.optim.SGD(net.parameters(), 0.1)
if os.path.exists("saved.pt"):
    saved = torch.load("saved.pt", weights_only=True)
    net.load_state_dict(saved["net"])
    average.load_state_dict(saved["average"])
    begin = saved["epoch"]
dist.barrier()
ddp, sampler = DDP(net), DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
for epoch in range(begin, 4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for old, new in zip(average.parameters(), net.parameters()):
        old.data.lerp_(new.data, 1 / (epoch + 1))
    for x, _ in loader:
        with torch.no_grad():
            average(x)
    if epoch % 2 and dist.get_rank() == 0:
        state = {"net": net.state_dict(), "average": average.state_dict(), "epoch": epoch + 1}
        torch.save(state, "saved.pt")
dist.destroy_process_group()
"""


def test_a_pass_without_a_step_is_no_further_epoch(tmp_path):
    """As the statistics of an averaged model are set, after the last epoch, too."""

    def prove(source):
        (tmp_path / "train.py").write_text(source)
        return run(tmp_path, "--resume", "auto", *TORCHRUN, "train.py")

    ended = prove(READS_ONCE_MORE)
    assert verdict(ended, "resume: epoch") == "right"
    assert ended.returncode == 0
    one_more = READS_ONCE_MORE.replace("range(begin, 4)", "range(begin, 4 + begin // 2)")
    ended = prove(one_more)  # the control
    assert verdict(ended, "resume: epoch") == "WRONG"
    assert "more steps follow after step" in ended.stdout
