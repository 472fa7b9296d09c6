# The parts of a script, and how they are written: as functions, a class, one module.

# %% constants
EPOCHS, LR = 3, 0.1
# %% constants, if batch size is per rank
BATCH = 8  # on each rank
# %% constants, if batch size is global
GLOBAL_BATCH = 16
# %% constants
STEPS = BATCHES_IN_AN_EPOCH  # batches in an epoch
ACCUMULATE = BATCHES_IN_A_STEP

# Before the first epoch.

# %% data
train_set = DATASET(ROWS, seed=1)
# %% data, if evaluation is strided or rank 0 or rank 0, broadcast
test_set = DATASET(24, seed=2)
TEST_LOADER
# %% TEST_LOADER, if evaluation is rank 0 or rank 0, broadcast
test_loader = DataLoader(test_set, batch_size=4, **TEST_COLLATE)
# fmt: off
# %% TEST_LOADER, if test loader is Subset
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=4, **TEST_COLLATE)
# %% TEST_LOADER, if test loader is sampler
test_loader = DataLoader(test_set, batch_size=4, sampler=range(rank, len(test_set), world), **TEST_COLLATE)
# fmt: on
# %% model, if weights is alike
torch.manual_seed(0)
# %% model, if weights is by rank, broadcast
torch.manual_seed(rank)
# %% model
BUILD
params = [p for p in net.parameters() if p.requires_grad]
BROADCAST
WRAP
AFTER_WRAP
# %% BROADCAST
for tensor in net.state_dict().values():
    dist.broadcast(tensor, src=0)
# %% ready, if precision is scaler or autocast with scaler
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
# %% ready
GENERATORS
torch.manual_seed(1000 + rank)

# An epoch.

# %% epoch
LOADER_OF_EPOCH
RATE
model.train()
total = torch.zeros(())
for step, batch in enumerate(BATCHES):
    INDEX
    UNPACK
    STEP
    total += LOGGED
dist.all_reduce(total)
mean_loss = MEAN
# %% RATE, if lr by hand is LR
lr = LR
# %% RATE, if lr by hand is LR * 0.9**epoch
lr = LR * 0.9**epoch

# %% evaluation, if evaluation is strided or rank 0 or rank 0, broadcast
BUFFERS
net.eval()
totals = torch.zeros(2)
TEST_ON_RANKS
SHARE_TOTALS
net.train()
val_loss = totals[0] / TESTED
# %% TEST_ON_RANKS, if evaluation is strided
TEST
# %% TEST_ON_RANKS, if evaluation is rank 0 or rank 0, broadcast
if rank == 0:
    TEST
# %% SHARE_TOTALS, if evaluation is strided
dist.all_reduce(totals)
# %% SHARE_TOTALS, if evaluation is rank 0, broadcast
dist.broadcast(totals, src=0)
# %% TESTED, if evaluation is strided or rank 0, broadcast
totals[1]
# %% TESTED, if evaluation is rank 0
totals[1].clamp(min=1)
# %% BUFFERS
for buffer in net.buffers():
    dist.broadcast(buffer, src=0)
# %% TEST
with torch.no_grad():
    for batch in test_loader:
        UNPACK
        EVALUATE
        totals[0] += value
        totals[1] += n

# %% end, if schedule is StepLR
scheduler.step()
# %% end, if schedule is plateau
scheduler.step(val_loss)
# %% end
if rank == 0:
    SAY
    SAVE
# %% end, if saving is rank 0
dist.barrier()
# %% SAY, if evaluation is none
print(f"epoch {epoch}  loss {mean_loss:.4f}")
# %% SAY, if evaluation is strided or rank 0 or rank 0, broadcast
print(f"epoch {epoch}  loss {mean_loss:.4f}  test {val_loss:.4f}")
# fmt: off
# %% SAVE, if saving is rank 0
states = {'model': net.state_dict(), 'epoch': epoch}
torch.save(states, 'last.pt')
# fmt: on

# The whole.

# %% JOIN, if join is get_rank
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
# %% JOIN, if join is environment
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world)
# %% LOOP
for epoch in range(EPOCHS):
    EPOCH
    EVALUATION
    END
# %% script, if launcher is module
JOIN
SETUP
LOOP
dist.destroy_process_group()


# %% script, if launcher is main
def main():
    JOIN
    SETUP
    LOOP
    dist.destroy_process_group()


if __name__ == "__main__":
    main()


# %% script, if launcher is functions
def train_one_epoch(TRAINING_NEEDS):
    EPOCH
    return mean_loss


EVALUATE_FUNCTION


def main():
    JOIN
    SETUP
    for epoch in range(EPOCHS):
        mean_loss = train_one_epoch(TRAINING_NEEDS)
        EVALUATE_CALL
        END
    dist.destroy_process_group()


if __name__ == "__main__":
    main()


# %% EVALUATE_FUNCTION, if launcher is functions
def evaluate(EVALUATION_NEEDS):
    EVALUATION
    return val_loss


# %% EVALUATE_CALL, if launcher is functions
val_loss = evaluate(EVALUATION_NEEDS)


# %% script, if launcher is Trainer
class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        SETUP

    def train_epoch(self, epoch):
        EPOCH
        return mean_loss

    EVALUATE_FUNCTION

    def fit(self):
        for epoch in range(EPOCHS):
            mean_loss = self.train_epoch(epoch)
            EVALUATE_CALL
            END


def main():
    JOIN
    Trainer(rank, world).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()


# %% EVALUATE_FUNCTION, if launcher is Trainer
def evaluate(self):
    EVALUATION
    return val_loss


# %% EVALUATE_CALL, if launcher is Trainer
val_loss = self.evaluate()


# %% script, if launcher is spawn
def run(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    SETUP
    LOOP
    dist.destroy_process_group()


if __name__ == "__main__":
    HOW_MANY
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    mp.spawn(run, args=(world,), nprocs=world)
# %% HOW_MANY, if ranks from is option
parser = argparse.ArgumentParser()
parser.add_argument("--world-size", type=int, default=2)
world = parser.parse_args().world_size
# %% HOW_MANY, if ranks from is environment
world = int(os.environ.get("RANKS", 2))
