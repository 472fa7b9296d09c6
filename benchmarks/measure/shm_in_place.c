/* Could two ranks add up a tensor without writing it to shared memory first? Three ways take turns:
 *
 *     rows            fast.c: write the own row, read the other one
 *     shared tensors  the tensors lie in shared memory: each rank adds up one half where it lies,
 *                     and copies the other half from the other tensor
 *     process_vm_readv  the same, but the kernel reads a tensor that belongs to the other process
 *
 * measure_shm.py compiles and runs it. Prints JSON: the medians of rank 0 in microseconds.
 */
#define _GNU_SOURCE
#define wait wait_for_ranks
#include "../packages/shm/src/shm/fast.c"
#undef wait
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>

enum { ROWS, SHARED, READV, COPY, WAYS };
enum { ROW_BYTES = 1 << 21, KERNEL_BLOCK = 1 << 18 };
static const char *const names[WAYS] = {"rows", "shared_tensors", "process_vm_readv", "limit"};

static void meet(Call *c) {
    arrive(c);
    while (wait_for_ranks(c, 100000) != DONE) {
    }
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void read_other(pid_t other, float *target, const float *source, int64_t bytes) {
    struct iovec here = {target, bytes}, there = {(void *)source, bytes};
    if (process_vm_readv(other, &here, 1, &there, 1, 0) != bytes) perror("process_vm_readv"), exit(1);
}

static char *memory(int64_t bytes, int flags) {
    char *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
    memset(m, 0, bytes);
    return m;
}

int main(void) {
    char *segment = memory(4096 + 4 * ROW_BYTES, MAP_SHARED);
    struct { pid_t pid; float *tensor; } *ranks = (void *)memory(4096, MAP_SHARED);
    int64_t sizes[] = {1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24}, count = 5;
    float *shared = (float *)memory(2 << 24, MAP_SHARED);
    ranks[0].pid = getpid();
    int rank = fork() == 0;
    ranks[rank].pid = getpid();
    ranks[rank].tensor = (float *)memory(1 << 24, MAP_PRIVATE);
    float *own = ranks[rank].tensor, *copy = (float *)memory(1 << 24, MAP_PRIVATE);
    float *block = (float *)memory(KERNEL_BLOCK, MAP_PRIVATE);
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(rank, &core);
    sched_setaffinity(0, sizeof core, &core);
    Call c = {(int64_t *)segment, segment + 4096, rank, 2, ROW_BYTES, 1 << 16};
    c.root = -1;
    meet(&c);
    if (rank == 0) printf("[");
    for (int s = 0; s < count; s++) {
        int64_t size = sizes[s], half = size / 2 / sizeof(float), n = 400000000 / size;
        n = n > 2000 ? 2000 : n < 60 ? 60 : n;
        float *mine = shared + rank * 2 * half, *theirs = shared + !rank * 2 * half;
        int64_t first = rank * half, second = !rank * half;
        double *us[WAYS];
        for (int way = 0; way < WAYS; way++) us[way] = malloc(n * sizeof(double));
        for (int i = 0; i < n; i++) {
            for (int way = 0; way < WAYS; way++) {
                meet(&c);
                int64_t begin = nanoseconds();
                if (way == ROWS) {
                    c.tensor = (char *)own, c.size = size, c.start = 0, c.next = WRITE;
                    while (all_reduce(&c, 20000) != DONE) {
                    }
                } else if (way == SHARED) {
                    float *parts[] = {shared + first, shared + 2 * half + first};
                    meet(&c);
                    sum_float(mine + first, parts, half, 2);
                    meet(&c);
                    memcpy(mine + second, theirs + second, half * sizeof(float));
                    meet(&c); /* now it may be overwritten */
                } else if (way == READV) {
                    const float *other = ranks[!rank].tensor;
                    int64_t most = KERNEL_BLOCK / sizeof(float);
                    meet(&c);
                    for (int64_t at = 0; at < half; at += most) {
                        int64_t part = half - at < most ? half - at : most;
                        read_other(ranks[!rank].pid, block, other + first + at, part * sizeof(float));
                        float *here = own + first + at, *parts[] = {rank ? block : here, rank ? here : block};
                        sum_float(here, parts, part, 2);
                    }
                    meet(&c);
                    read_other(ranks[!rank].pid, own + second, other + second, half * sizeof(float));
                    meet(&c);
                } else {
                    memcpy(copy, own, size);
                    __asm__ volatile("" ::"r"(copy) : "memory");
                }
                us[way][i] = (nanoseconds() - begin) / 1e3;
            }
        }
        if (rank == 0) printf("%s\n{\"bytes\": %ld, \"n\": %ld", s ? "," : "", size, n);
        for (int way = 0; way < WAYS; way++) {
            qsort(us[way], n, sizeof(double), compare);
            if (rank == 0) printf(", \"%s_us\": %.2f", names[way], us[way][n / 2]);
        }
        if (rank == 0) printf("}"), fflush(stdout);
    }
    if (rank == 0) printf("]\n"), wait(NULL);
    return 0;
}
