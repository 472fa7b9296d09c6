/* The inner loop of exchange.py where Python is too slow. It does the same, in the same order and
 * with the same bits, so a rank that runs it and a rank that runs Python understand each other.
 * fast.py compiles and calls it. It defines the constants that both sides must know: the counters of
 * a rank (see segment.py), MAX_RANKS, SPINS_PER_YIELD, and what all_reduce returns: DONE or
 * DIFFERS. The last three functions measure the limit, for speed.py.
 */

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { WRITE, SUM, COLLECT }; /* what comes next */
enum { BLOCK = 512 };
enum { SMALL = 1024, LARGE = 1 << 18, SLOW = 5 /* bytes per ns */ }; /* see put */
enum { IN_A_ROW = 3, TRIES = 200 };

typedef struct {
    int64_t *counters;
    char *slots; /* (2, ranks, row_bytes) */
    int64_t rank, ranks, row_bytes, sliced;
    int64_t arrivals, pieces;
    char *tensor;
    int64_t size, dtype, root, call, transfer; /* root: who wants the sum, or -1 for all */
    int64_t start, next;
} SumState; /* as in fast.py */

const int64_t size_of_state = sizeof(SumState);

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t copy_around_the_cache(char *target, const char *source, int64_t size) {
    int64_t i = 0;
#ifdef __x86_64__
    if ((uintptr_t)target % 16 == 0) {
        for (; i + 16 <= size; i += 16)
            _mm_stream_si128((__m128i *)(target + i), _mm_loadu_si128((const void *)(source + i)));
        _mm_sfence(); /* these stores, unlike others of x86, are not kept in order */
    }
#endif
    return i; /* bytes that are copied */
}

/* Copy into shared memory. Other cores have read what was there before, so before a core may write
 * to a line, their caches must give it up: line by line, which is slow, and very slow if the cores
 * have no cache in common. Writing around the cache avoids that, but whoever reads it has to go to
 * memory. It pays for middle sizes, and for large ones if copying turns out to be very slow, three
 * times in a row, since a single copy may have lost its core or come from a cold cache. This is
 * tried again from time to time: a virtual machine may wander from core to core.
 */
void put(char *target, const char *source, int64_t size) {
    static int64_t slow = 0;   /* so many large copies in a row were */
    static int64_t around = 0; /* so many of the next large ones go around the cache */
    int64_t copied = 0, begin = 0;
    if (size > SMALL && (size <= LARGE || around > 0))
        copied = copy_around_the_cache(target, source, size);
    if (size > LARGE) begin = around-- > 0 ? 0 : nanoseconds();
    memcpy(target + copied, source + copied, size - copied);
    if (begin) {
        slow = nanoseconds() - begin > size / SLOW ? slow + 1 : 0;
        around = slow >= IN_A_ROW ? TRIES : 0;
    }
}

/* total = parts[0] + parts[1] + ..., in this order; total may be one of them. */
#define DEFINE_SUM(name, type)                                                             \
    static void name(type *total, type *const *parts, int64_t count, int64_t ranks) {      \
        type sum[BLOCK];                                                                   \
        for (int64_t i = 0; i < count; i += BLOCK) {                                       \
            int64_t n = count - i < BLOCK ? count - i : BLOCK;                             \
            const type *left = parts[0] + i;                                               \
            for (int64_t r = 1; r < ranks; r++) {                                          \
                const type *right = parts[r] + i;                                          \
                type *to = r == ranks - 1 ? total + i : sum;                               \
                _Pragma("GCC ivdep") for (int64_t j = 0; j < n; j++) to[j] = left[j] + right[j]; \
                left = sum;                                                                \
            }                                                                              \
        }                                                                                  \
    }
DEFINE_SUM(sum_float, float)
DEFINE_SUM(sum_double, double)
DEFINE_SUM(sum_int32, uint32_t) /* unsigned, as overflow is to wrap around */
DEFINE_SUM(sum_int64, uint64_t)
static const int64_t BYTES_OF_DTYPE[] = {4, 8, 4, 8};

static void sum(const SumState *c, char *total, char *const *parts, int64_t size) {
    int64_t count = size / BYTES_OF_DTYPE[c->dtype];
    switch (c->dtype) {
        case 0: sum_float((float *)total, (float *const *)parts, count, c->ranks); break;
        case 1: sum_double((double *)total, (double *const *)parts, count, c->ranks); break;
        case 2: sum_int32((uint32_t *)total, (uint32_t *const *)parts, count, c->ranks); break;
        case 3: sum_int64((uint64_t *)total, (uint64_t *const *)parts, count, c->ranks); break;
    }
}

static void arrive(SumState *c) {
    int64_t *own = c->counters + c->rank * COUNTERS, odd = ++c->arrivals % 2;
    own[CALL + odd] = c->call;
    own[TRANSFER + odd] = c->transfer;
    __atomic_store_n(own + ARRIVED, c->arrivals, __ATOMIC_RELEASE); /* after all that is above */
    own[BELL]++;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (own[BELL + ASLEEP]) {
        own[BELL + ASLEEP] = 0;
        syscall(SYS_futex, own + BELL, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

/* Look that often for the others' arrival. */
static int64_t wait(const SumState *c, int64_t spins) {
    for (int64_t r = 0; r < c->ranks; r++) {
        const int64_t *other = c->counters + r * COUNTERS, odd = c->arrivals % 2;
        while (__atomic_load_n(other + ARRIVED, __ATOMIC_ACQUIRE) < c->arrivals) {
            if (spins-- <= 0) return r;
            if (spins % SPINS_PER_YIELD == 0) sched_yield();
#ifdef __x86_64__
            _mm_pause();
#endif
        }
        if (other[CALL + odd] != c->call || other[TRANSFER + odd] != c->transfer)
            return DIFFERS - r;
    }
    return DONE;
}

/* Where the slice of a rank begins in a piece: as tensor_split. */
static int64_t slice(const SumState *c, int64_t size, int64_t rank) {
    int64_t width = BYTES_OF_DTYPE[c->dtype], count = size / width, rest = count % c->ranks;
    return (count / c->ranks * rank + (rank < rest ? rank : rest)) * width;
}

/* Exchange.all_reduce for a sum. Goes on until it has to wait: call it again. */
int64_t all_reduce(SumState *c, int64_t spins) {
    char *parts[MAX_RANKS];
    for (;;) {
        int64_t left = c->size - c->start, size = left < c->row_bytes ? left : c->row_bytes, late;
        char *tensor = c->tensor + c->start, *rows = c->slots;
        int wants_it = c->root < 0 || c->root == c->rank;
        int is_sliced = c->ranks > 2 && size > c->sliced;
        if (c->next == WRITE) c->pieces++;
        rows += c->pieces % 2 * c->ranks * c->row_bytes;
        char *own = rows + c->rank * c->row_bytes;
        if (c->next == WRITE) {
            put(own, tensor, size);
            arrive(c);
            c->next = SUM;
        }
        if ((late = wait(c, spins)) != DONE) return late;
        if (c->next == SUM) {
            int64_t from = is_sliced ? slice(c, size, c->rank) : 0;
            int64_t to = is_sliced ? slice(c, size, c->rank + 1) : size;
            for (int64_t r = 0; r < c->ranks; r++) parts[r] = rows + r * c->row_bytes + from;
            parts[c->rank] = tensor + from; /* nearer than its copy */
            if (is_sliced || wants_it)
                sum(c, is_sliced ? own + from : tensor, parts, to - from);
            if (is_sliced) {
                arrive(c);
                c->next = COLLECT;
                continue;
            }
        } else if (wants_it) {
            for (int64_t r = 0; r < c->ranks; r++) {
                int64_t from = slice(c, size, r);
                memcpy(tensor + from, rows + r * c->row_bytes + from, slice(c, size, r + 1) - from);
            }
        }
        c->next = WRITE;
        c->start += size;
        if (c->start >= c->size) return DONE;
    }
}

/* What speed.py compares with: each returns nanoseconds, of all repeats together. */

/* Read each number, and write it back: no sum can do less to its own tensor. */
int64_t read_and_write(float *numbers, int64_t count, float zero, int64_t repeats) {
    int64_t begin = nanoseconds();
    for (int64_t i = 0; i < repeats; i++) {
        for (int64_t j = 0; j < count; j++) numbers[j] += zero;
        __asm__ volatile("" ::"r"(numbers) : "memory"); /* so that no repeat is left out */
    }
    return nanoseconds() - begin;
}

int64_t copy(char *target, const char *source, int64_t size, int64_t repeats) {
    int64_t begin = nanoseconds();
    for (int64_t i = 0; i < repeats; i++) {
        memcpy(target, source, size);
        __asm__ volatile("" ::"r"(target) : "memory");
    }
    return nanoseconds() - begin;
}

/* Two ranks write to one cache line in turns; line: 0 at first. -1 if the other one stays away. */
int64_t exchange_line(int64_t *line, int64_t rank, int64_t repeats) {
    int64_t begin = nanoseconds(), looks = 0;
    for (int64_t i = 0; i < repeats; i++) {
        while (__atomic_load_n(line, __ATOMIC_ACQUIRE) != 2 * i + rank)
            if (++looks % (1 << 20) == 0 && nanoseconds() - begin > 1000000000) return -1;
        __atomic_store_n(line, 2 * i + rank + 1, __ATOMIC_RELEASE);
    }
    return nanoseconds() - begin;
}
