// The C interface: every call ends with a number or a sentence, never with an exception.
#include "halfbyte_cpu.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <system_error>

#include "instance.h"
#include "operations.h"
#include "step.h"

using halfbyte::Instance;
using halfbyte::Pool;

struct hb_pool { Pool pool; };
struct hb_instance { Instance* instance; };
struct hb_scratch { Instance* instance; };

extern "C" {

hb_pool* hb_pool_create(int32_t threads, const int32_t* cores) {
    try {
        return new hb_pool{{threads, cores}};
    } catch (const std::system_error&) {  // no more threads to be had
        return nullptr;
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void hb_pool_destroy(hb_pool* pool) { delete pool; }

hb_instance* hb_create(const hb_model* model, hb_pool* pool, int32_t most_rows, char* error, int64_t error_size) {
    try {
        Instance* instance = halfbyte::make_instance(*model, &pool->pool, most_rows, error, error_size);
        return instance ? new hb_instance{instance} : nullptr;
    } catch (const std::bad_alloc&) {
        halfbyte::say(error, error_size, "there is no memory for another model.");
        return nullptr;
    }
}

void hb_destroy(hb_instance* instance) {
    if (!instance) return;
    halfbyte::destroy_instance(instance->instance);
    delete instance;
}

int64_t hb_scratch_bytes(const hb_model* model, int32_t threads, int32_t most_rows) {
    return halfbyte::scratch_bytes(*model, threads, most_rows);
}

int32_t hb_run(hb_instance* instance, const hb_step* step, char* error, int64_t error_size) {
    Instance& in = *instance->instance;
    if (!halfbyte::check_step(in, *step, error, error_size)) return 1;
    std::lock_guard<std::mutex> hold(in.pool->lock);
    in.pool->make_room();
    halfbyte::run_step(in, *step);
    return 0;
}

hb_scratch* hb_scratch_create(const hb_experts* experts, hb_pool* pool, int32_t most_rows, char* error, int64_t error_size) {
    try {
        Instance* instance = halfbyte::make_expert_scratch(*experts, &pool->pool, most_rows, error, error_size);
        return instance ? new hb_scratch{instance} : nullptr;
    } catch (const std::bad_alloc&) {
        halfbyte::say(error, error_size, "there is no memory for the experts' scratch.");
        return nullptr;
    }
}

void hb_scratch_destroy(hb_scratch* scratch) {
    if (!scratch) return;
    halfbyte::destroy_instance(scratch->instance);
    delete scratch;
}

int32_t hb_run_experts(hb_scratch* scratch, const hb_experts* experts, int32_t rows, const float* h, const int32_t* ids,
                       const float* shares, float* out, char* error, int64_t error_size) {
    Instance& in = *scratch->instance;
    if (!halfbyte::check_experts(in, *experts, rows, ids, error, error_size)) return 1;
    std::lock_guard<std::mutex> hold(in.pool->lock);
    in.pool->make_room();
    halfbyte::run_experts_alone(in, *experts, rows, h, ids, shares, out);
    return 0;
}

void hb_run_expert_job(void* address) {
    hb_expert_job& job = *static_cast<hb_expert_job*>(address);
    char error[256];
    if (!hb_run_experts(job.scratch, job.experts, job.rows, job.h, job.ids, job.shares, job.out, error, sizeof error)) return;
    ++job.failures;
    std::fill_n(job.out, static_cast<int64_t>(job.rows) * job.experts->hidden, std::numeric_limits<float>::quiet_NaN());
}

int32_t hb_run_product(hb_pool* pool, const hb_matrix* m, const float* bias, int32_t int8_activations, int32_t rows,
                       const float* x, float* out, char* error, int64_t error_size) {
    if (!halfbyte::check_product(*m, rows, error, error_size)) return 1;
    try {
        std::lock_guard<std::mutex> hold(pool->pool.lock);
        pool->pool.make_room();
        halfbyte::run_product_alone(pool->pool, *m, bias, int8_activations != 0, rows, x, out);
    } catch (const std::bad_alloc&) {
        halfbyte::say(error, error_size, "there is no memory for the product of %d rows.", rows);
        return 1;
    }
    return 0;
}

uint64_t hb_read(hb_pool* pool, const uint64_t* words, int64_t count) {
    constexpr int64_t STREAMS = 4, LINE = 8, AHEAD = 64 * LINE;  // a core that follows one stream alone waits for memory
    constexpr int64_t STREAM = 4096 * LINE, ITEM = STREAMS * STREAM;
    std::lock_guard<std::mutex> hold(pool->pool.lock);
    pool->pool.make_room();
    std::atomic<uint64_t> total{0};
    const int64_t items = count / ITEM;
    pool->pool.run(items, [&](int64_t item, int) {
        const uint64_t* at = words + item * ITEM;
        uint64_t sums[LINE] = {};
        for (int64_t i = 0; i < STREAM; i += LINE) {
            for (int64_t s = 0; s < STREAMS; s++) {
                const uint64_t* line = at + s * STREAM + i;
                __builtin_prefetch(line + AHEAD);
                for (int64_t w = 0; w < LINE; w++) sums[w] += line[w];
            }
        }
        uint64_t sum = 0;
        for (const uint64_t part : sums) sum += part;
        total.fetch_add(sum, std::memory_order_relaxed);
    });
    uint64_t rest = total.load();
    for (int64_t i = items * ITEM; i < count; i++) rest += words[i];
    return rest;
}

const char* hb_instruction_set(void) { return halfbyte::instruction_set(); }

int64_t hb_struct_size(int32_t which) {
    const int64_t sizes[] = {sizeof(hb_matrix),  sizeof(hb_layer),       sizeof(hb_model),  sizeof(hb_step),
                             sizeof(hb_experts), sizeof(hb_stored_rows), sizeof(hb_packing), sizeof(hb_expert_job)};
    return which >= 0 && which < 8 ? sizes[which] : -1;
}

}  // extern "C"
