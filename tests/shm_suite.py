"""draft"""
import json, os, sys, tempfile, unittest
backend, size = sys.argv[1], sys.argv[2]
temp = tempfile.mkdtemp()
os.environ.update(BACKEND="gloo", WORLD_SIZE=size, TEMP_DIR=temp, INIT_METHOD=f"file://{temp}/shared_init_file", OMP_NUM_THREADS="1", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="120")
import torch, torch.distributed as dist
torch.set_num_threads(1)
if backend == "shm":
    import shm
    P = dist.Backend._plugins
    P["GLOO"] = P["SHM"]
from torch.testing._internal.distributed import distributed_test as D
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend
if backend == "shm":
    D.PROFILING_SUPPORTED_BACKENDS.remove("gloo"); D.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.remove("gloo")

class Suite(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        proc = torch.multiprocessing.get_context("fork").Process
        self._start_processes(proc)

class Result(unittest.TextTestResult):
    def startTest(self, t):
        super().startTest(t); self.addSuccess_ = False
    def addSuccess(self, t):
        super().addSuccess(t); found["passed"].append(t._testMethodName)
    def addError(self, t, e):
        super().addError(t, e); found["failed"][t._testMethodName] = self._exc_info_to_string(e, t)[-3000:]
    addFailure = addError
    def addSkip(self, t, why):
        super().addSkip(t, why); found["skipped"][t._testMethodName] = why

found = {"passed": [], "failed": {}, "skipped": {}}
suite = unittest.defaultTestLoader.loadTestsFromTestCase(Suite)
names = sys.argv[4:]
if names:
    suite = unittest.TestSuite(t for t in suite if t._testMethodName in names)
unittest.TextTestRunner(resultclass=Result, verbosity=2).run(suite)
json.dump(found, open(sys.argv[3], "w"), indent=1)
print({k: len(v) for k, v in found.items()})
