/* Threads that help if they can. A piece of work is cut into parts; whoever is free takes the next one, and the caller,
 * who takes parts too, waits only for parts that somebody has begun. A helper that the system does not let run is not
 * waited for, as OpenMP's barriers would: beside other busy processes that makes a step several times faster.
 *
 * Helpers spin for some 30 us between two pieces of work, then sleep. They are few, start once and never end; after a
 * fork the child simply has none.
 */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

#define MAX_HELPERS 255
#define SPINS 2000
#define PART_BITS 20 /* of the ticket: the next part, then the number of parts, then the number of the work */
#define PART_MASK ((1ull << PART_BITS) - 1)

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

static struct {
    _Atomic uint64_t ticket;
    _Atomic long done;
    void (*run)(void *, long);
    void *arguments;
    pthread_mutex_t owner, sleeping; /* owner: held by the caller whose work this is */
    pthread_cond_t wake;
    _Atomic int sleepers;
    int helpers;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .sleeping = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* Memory of the calling thread for `count` floats, on a cache line, good until it asks again; 0 if there is none. */
static float *room(long count) {
    static _Thread_local float *memory;
    static _Thread_local long size;
    if (count > size) {
        free(memory);
        memory = aligned_alloc(64, (size_t)(count + 15) / 16 * 64);
        size = memory ? count : 0;
    }
    return memory;
}

static int has_parts(uint64_t ticket) { return (ticket & PART_MASK) < (ticket >> PART_BITS & PART_MASK); }

/* Takes and runs parts until none is left. A part that is taken keeps its work alive until it is done. */
static void take_parts(void) {
    uint64_t ticket = atomic_load(&pool.ticket);
    while (has_parts(ticket)) {
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) continue;
        pool.run(pool.arguments, (long)(ticket & PART_MASK));
        atomic_fetch_add(&pool.done, 1);
        ticket = atomic_load(&pool.ticket);
    }
}

static void *help(void *nothing) {
    (void)nothing;
    for (;;) {
        take_parts();
        int spins = 0;
        while (!has_parts(atomic_load(&pool.ticket)) && spins++ < SPINS) RELAX();
        if (spins <= SPINS) continue;
        pthread_mutex_lock(&pool.sleeping);
        atomic_fetch_add(&pool.sleepers, 1);
        while (!has_parts(atomic_load(&pool.ticket))) pthread_cond_wait(&pool.wake, &pool.sleeping);
        atomic_fetch_sub(&pool.sleepers, 1);
        pthread_mutex_unlock(&pool.sleeping);
    }
    return 0;
}

static void start_helpers(int wanted) {
    sigset_t all, before; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool.helpers < wanted && pool.helpers < MAX_HELPERS; pool.helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help, 0)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* run(arguments, part) for each of `parts`, on this thread and up to `threads` - 1 others. */
static void in_parallel(void (*run)(void *, long), void *arguments, long parts, int threads) {
    if (threads < 2 || parts < 2 || parts > (long)PART_MASK || pthread_mutex_trylock(&pool.owner)) {
        for (long part = 0; part < parts; part++) run(arguments, part);
        return;
    }
    if (pool.helpers < threads - 1) start_helpers(threads - 1);
    pool.run = run, pool.arguments = arguments;
    atomic_store(&pool.done, 0);
    uint64_t work = (atomic_load(&pool.ticket) >> 2 * PART_BITS) + 1;
    atomic_store(&pool.ticket, work << 2 * PART_BITS | (uint64_t)parts << PART_BITS);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleeping);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleeping);
    }
    take_parts();
    for (int spins = 0; atomic_load(&pool.done) < parts;)
        if (spins++ < SPINS) RELAX();
        else sched_yield();
    pthread_mutex_unlock(&pool.owner);
}
