// Replays reference cases without Python: replay THREADS FILE… Each file holds a model, steps, the reference's logits and a
// bound (write_cases.py writes them); the steps run through the C interface, once with one thread and once with THREADS,
// and must agree to the bit with each other and within the bound with the reference.
//
// A file is "HBCASE1\n", then records: name length, name, byte count (both int64), bytes.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "halfbyte_cpu.h"

namespace {

[[noreturn]] void fail(const std::string& sentence) {
    std::fprintf(stderr, "replay: %s\n", sentence.c_str());
    std::exit(2);
}

// Exactly as many bytes as there are, so that a sanitizer sees whoever reads past them; aligned as matrices must be.
struct Bytes {
    std::unique_ptr<uint8_t, void (*)(void*)> data{nullptr, std::free};
    size_t size = 0;
};

class Case {
public:
    explicit Case(const char* path) {
        std::FILE* file = std::fopen(path, "rb");
        if (!file) fail(std::string(path) + " cannot be opened.");
        char magic[8];
        if (std::fread(magic, 1, 8, file) != 8 || std::memcmp(magic, "HBCASE1\n", 8)) fail(std::string(path) + " is no case.");
        int64_t length;
        while (std::fread(&length, 8, 1, file) == 1) {
            std::string name(static_cast<size_t>(length), ' ');
            int64_t count;
            if (std::fread(&name[0], 1, name.size(), file) != name.size() || std::fread(&count, 8, 1, file) != 1)
                fail(std::string(path) + " ends too early.");
            Bytes bytes;
            bytes.size = static_cast<size_t>(count);
            void* memory = nullptr;
            if (posix_memalign(&memory, 64, bytes.size ? bytes.size : 1)) fail("there is no memory.");
            bytes.data.reset(static_cast<uint8_t*>(memory));
            if (std::fread(memory, 1, bytes.size, file) != bytes.size) fail(std::string(path) + " ends too early.");
            records_.emplace(name, std::move(bytes));
        }
        std::fclose(file);
    }
    bool has(const std::string& name) const { return records_.count(name) > 0; }
    template <class T>
    T* get(const std::string& name) const {
        const auto found = records_.find(name);
        if (found == records_.end()) fail("the case has no " + name + ".");
        return reinterpret_cast<T*>(found->second.data.get());
    }
    template <class T>
    int64_t count(const std::string& name) const {
        get<T>(name);
        return static_cast<int64_t>(records_.at(name).size / sizeof(T));
    }

private:
    std::map<std::string, Bytes> records_;
};

hb_matrix matrix(const Case& c, const std::string& name) {
    const int64_t* shape = c.get<int64_t>(name + ".shape");  // format, rows, cols
    return {static_cast<int32_t>(shape[0]), 0, shape[1], shape[2], c.get<void>(name)};
}

hb_model model(const Case& c, std::vector<hb_layer>& layers) {
    const int32_t* n = c.get<int32_t>("model.sizes");
    const float* f = c.get<float>("model.numbers");
    hb_model m{};
    std::memcpy(&m.abi, n, 16 * sizeof(int32_t));
    m.norm_eps = f[0], m.swiglu_limit = f[1], m.swiglu_alpha = f[2], m.rope_temperature = f[3];
    for (int32_t i = 0; i < m.layers; ++i) {
        const std::string at = "layer." + std::to_string(i) + ".";
        const int32_t* kind = c.get<int32_t>(at + "kind");
        const auto numbers = [&](const char* role) { return c.get<float>(at + role); };
        layers.push_back({numbers("attn_norm"), matrix(c, at + "qkv"), numbers("qkv_bias"),
                          c.has(at + "sinks") ? numbers("sinks") : nullptr, matrix(c, at + "o"), numbers("o_bias"),
                          numbers("mlp_norm"), numbers("router"), numbers("router_bias"), matrix(c, at + "gate_up"),
                          numbers("gate_up_bias"), matrix(c, at + "down"), numbers("down_bias"), kind[0], kind[1]});
    }
    m.rope_inverse = c.get<float>("rope_inverse");
    m.embed = c.get<void>("embed");
    m.layer = layers.data();
    m.final_norm = c.get<float>("final_norm");
    m.lm_head = matrix(c, "lm_head");
    return m;
}

// Logits of all steps; the cache begins as zeros.
std::vector<float> run(const Case& c, int threads, int32_t most_rows, std::vector<int32_t>& best) {
    std::vector<hb_layer> layers;
    const hb_model m = model(c, layers);
    char error[400] = "";
    hb_pool* pool = hb_pool_create(threads, nullptr);
    if (!pool) fail("the system gives no more threads.");
    hb_instance* instance = hb_create(&m, pool, most_rows, error, sizeof error);
    if (!instance) fail(error);
    const int64_t pages = c.get<int64_t>("pool")[0], cell = m.kv_format == 0 ? 4 : m.kv_format == 2 ? 2 : 1;
    const int64_t bytes = pages * m.layers_per_page * 2 * m.kv_heads * m.page_size * m.head_dim * cell;
    std::unique_ptr<uint8_t[]> cache(new uint8_t[static_cast<size_t>(bytes)]());
    std::vector<float> all;
    for (int i = 0; c.has("step." + std::to_string(i) + ".tokens"); ++i) {
        const std::string at = "step." + std::to_string(i) + ".";
        hb_step s{};
        const auto ints = [&](const char* name) { return c.get<int32_t>(at + name); };
        s.rows = static_cast<int32_t>(c.count<int32_t>(at + "tokens"));
        s.sequences = static_cast<int32_t>(c.count<int32_t>(at + "kv_lens"));
        s.logit_count = static_cast<int32_t>(c.count<int32_t>(at + "logit_rows"));
        s.tokens = ints("tokens"), s.positions = ints("positions"), s.query_start = ints("query_start");
        s.kv_lens = ints("kv_lens"), s.row_sequence = ints("row_sequence"), s.logit_rows = ints("logit_rows");
        s.sliding_table = ints("sliding"), s.full_table = ints("full");
        s.table_stride = c.count<int32_t>(at + "full") / s.sequences;
        s.kv_pool = cache.get();
        s.pages = pages;
        std::vector<float> logits(static_cast<size_t>(s.logit_count) * static_cast<size_t>(m.vocab));
        std::vector<int32_t> tokens(static_cast<size_t>(s.logit_count));
        s.logits = logits.data();
        s.best = tokens.data();
        if (hb_run(instance, &s, error, sizeof error)) fail(error);
        all.insert(all.end(), logits.begin(), logits.end());
        best.insert(best.end(), tokens.begin(), tokens.end());
    }
    hb_destroy(instance);
    hb_pool_destroy(pool);
    return all;
}

bool replay(const char* path, int threads) {
    const Case c(path);
    const int32_t vocab = c.get<int32_t>("model.sizes")[9];
    std::vector<int32_t> best, other_best;
    const std::vector<float> got = run(c, 1, 512, best), other = run(c, threads, 37, other_best);
    std::vector<float> want;
    for (int i = 0; c.has("step." + std::to_string(i) + ".tokens"); ++i) {
        const std::string name = "step." + std::to_string(i) + ".logits";
        want.insert(want.end(), c.get<float>(name), c.get<float>(name) + c.count<float>(name));
    }
    if (want.size() != got.size()) fail(std::string(path) + " has logits of other rows.");
    const bool same = other.size() == got.size() && std::memcmp(got.data(), other.data(), got.size() * 4) == 0 && best == other_best;
    const float* bound = c.get<float>("bound");  // worst row, mean of rows
    double worst = 0, sum = 0;
    const size_t rows = got.size() / static_cast<size_t>(vocab);
    bool finite = true;
    for (size_t r = 0; r < rows; ++r) {
        double off = 0, size = 0;
        for (size_t v = r * static_cast<size_t>(vocab); v < (r + 1) * static_cast<size_t>(vocab); ++v) {
            off += (static_cast<double>(got[v]) - want[v]) * (static_cast<double>(got[v]) - want[v]);
            size += static_cast<double>(want[v]) * want[v];
            finite = finite && std::isfinite(got[v]);
        }
        const double error = std::sqrt(off / size);
        worst = error > worst ? error : worst;
        sum += error;
    }
    const double mean = sum / static_cast<double>(rows);
    const bool good = same && finite && worst <= static_cast<double>(bound[0]) && mean <= static_cast<double>(bound[1]);
    const char* name = std::strrchr(path, '/');
    std::printf("%-28s %s, %d threads: worst row %.1e of %.1e, mean %.1e of %.1e%s%s  %s\n", name ? name + 1 : path,
                hb_instruction_set(), threads, worst, static_cast<double>(bound[0]), mean, static_cast<double>(bound[1]),
                same ? "" : ", OTHER BITS THAN ONE THREAD", finite ? "" : ", NOT FINITE", good ? "ok" : "WRONG");
    return good;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) fail("usage: replay THREADS FILE...");
    const int threads = std::atoi(argv[1]);
    if (threads < 1) fail("the first argument is a number of threads.");
    bool good = true;
    for (int i = 2; i < argc; ++i) good = replay(argv[i], threads) && good;
    return good ? 0 : 1;
}
