/* A libnvidia-ml.so.1 for machines without a GPU: says what the environment tells it to say.
 *
 * NVML_CODE_<function> is what a call returns, or "hang" for one that never does; NVML_VALUE_<fact> a value. Either may
 * end in _<index> of a GPU. Built with -DOLD it lacks the functions that old drivers lack. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;
#define MAX_GPUS 16
static int gpus[MAX_GPUS], instances[MAX_GPUS];

static const char *look(const char *kind, const char *name, int index) {
    char key[200];
    if (index >= 0) {
        snprintf(key, sizeof key, "NVML_%s_%s_%d", kind, name, index);
        if (getenv(key)) return getenv(key);
    }
    snprintf(key, sizeof key, "NVML_%s_%s", kind, name);
    return getenv(key);
}
static int code(const char *function, int index) {
    const char *text = look("CODE", function, index);
    while (text && !strcmp(text, "hang")) pause();
    return text ? atoi(text) : 0;
}
static ull value(const char *fact, int index, ull otherwise) {
    const char *text = look("VALUE", fact, index);
    return text ? strtoull(text, NULL, 0) : otherwise;
}
static int is_instance(void *handle) { return (int *)handle >= instances && (int *)handle < instances + MAX_GPUS; }
static int of(void *handle) { return is_instance(handle) ? -1 : (int)((int *)handle - gpus); }

#define ANSWER(function, index) do { int code_ = code(#function, index); if (code_) return code_; } while (0)
#define NUMBER(function, type, fact, otherwise) \
    int function(void *h, type *out) { ANSWER(function, of(h)); *out = (type)value(fact, of(h), otherwise); return 0; }

int nvmlInitWithFlags(uint flags) { ANSWER(nvmlInitWithFlags, -1); return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int number) { return "as the test asked for"; }
int nvmlSystemGetDriverVersion(char *out, uint size) {
    ANSWER(nvmlSystemGetDriverVersion, -1);
    snprintf(out, size, "%s", getenv("NVML_VALUE_driver") ? getenv("NVML_VALUE_driver") : "550.54.15");
    return 0;
}
int nvmlSystemGetCudaDriverVersion(int *out) {
    ANSWER(nvmlSystemGetCudaDriverVersion, -1); *out = (int)value("cuda", -1, 12040); return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }
int nvmlDeviceGetCount_v2(uint *out) { ANSWER(nvmlDeviceGetCount, -1); *out = (uint)value("count", -1, 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(uint index, void **out) {
    ANSWER(nvmlDeviceGetHandleByIndex, (int)index); *out = &gpus[index]; return 0;
}
int nvmlDeviceGetUUID(void *h, char *out, uint size) {
    if (is_instance(h)) { snprintf(out, size, "MIG-00000000-0000-0000-0000-00000000000%d", (int)((int *)h - instances)); return 0; }
    ANSWER(nvmlDeviceGetUUID, of(h));
    snprintf(out, size, "GPU-%08d-aaaa-bbbb-cccc-000000000000", of(h));
    return 0;
}
int nvmlDeviceGetName(void *h, char *out, uint size) {
    ANSWER(nvmlDeviceGetName, of(h)); snprintf(out, size, "NVIDIA Stub %d", of(h)); return 0;
}
struct pci { char legacy[16]; uint domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *h, struct pci *out) {
    ANSWER(nvmlDeviceGetPciInfo, of(h));
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", 0x65 + of(h));
    return 0;
}
NUMBER(nvmlDeviceGetComputeMode, uint, "compute_mode", 0)
struct memory { ull total, free, used; };
int nvmlDeviceGetMemoryInfo(void *h, struct memory *out) {
    ANSWER(nvmlDeviceGetMemoryInfo, of(h));
    out->total = value("memory_total", of(h), 16ull << 30);
    out->free = value(is_instance(h) ? "instance_free" : "memory_free", of(h), 15ull << 30);
    return 0;
}
struct process { uint pid; ull used; uint gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, uint *count, struct process *out) {
    ANSWER(nvmlDeviceGetComputeRunningProcesses, of(h));
    uint pid = (uint)value("pid", of(h), 0), room = *count;
    *count = pid != 0;
    if (!pid) return 0;
    if (!room) return 7;
    out[0] = (struct process){pid, value("pid_bytes", of(h), 15ull << 30), 0, 0};
    return 0;
}
int nvmlDeviceGetTemperature(void *h, uint sensor, uint *out) {
    ANSWER(nvmlDeviceGetTemperature, of(h)); *out = (uint)value("temperature", of(h), 45); return 0;
}
int nvmlDeviceGetTemperatureThreshold(void *h, uint which, uint *out) {
    ANSWER(nvmlDeviceGetTemperatureThreshold, of(h)); *out = (uint)value("slowdown", of(h), 98); return 0;
}
NUMBER(nvmlDeviceGetPerformanceState, uint, "pstate", 8)
struct rates { uint gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *h, struct rates *out) {
    ANSWER(nvmlDeviceGetUtilizationRates, of(h)); out->gpu = (uint)value("utilization", of(h), 0); out->memory = 0; return 0;
}
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, ull, "reasons", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, uint, "generation", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, uint, "max_generation", 4)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, uint, "width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, uint, "max_width", 16)
int nvmlDeviceGetEccMode(void *h, uint *now, uint *pending) {
    ANSWER(nvmlDeviceGetEccMode, of(h)); *now = *pending = (uint)value("ecc", of(h), 1); return 0;
}
int nvmlDeviceGetTotalEccErrors(void *h, uint type, uint counter, ull *out) {
    ANSWER(nvmlDeviceGetTotalEccErrors, of(h)); *out = value("ecc_errors", of(h), 0); return 0;
}
int nvmlDeviceGetMemoryErrorCounter(void *h, uint type, uint counter, uint place, ull *out) {
    ANSWER(nvmlDeviceGetMemoryErrorCounter, of(h)); *out = value("sram_errors", of(h), 0); return 0;
}
int nvmlDeviceGetRetiredPages(void *h, uint cause, uint *count, ull *out) {
    ANSWER(nvmlDeviceGetRetiredPages, of(h));
    uint room = *count, pages = cause ? 0 : (uint)value("retired", of(h), 0);
    *count = pages;
    if (!out || room < pages) return pages ? 7 : 0;
    for (uint page = 0; page < pages; page++) out[page] = page * 4096ull;
    return 0;
}
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, uint, "retirement_pending", 0)
NUMBER(nvmlDeviceGetPersistenceMode, uint, "persistence", 1)
int nvmlDeviceGetMigMode(void *h, uint *now, uint *pending) {
    ANSWER(nvmlDeviceGetMigMode, of(h)); *now = *pending = value("instances", of(h), 99) != 99; return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *h, uint *out) { *out = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, uint index, void **out) {
    if (index >= value("instances", of(h), 0)) return 6;
    *out = &instances[index];
    return 0;
}
#ifndef OLD
struct memory_v2 { uint version; ull total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *h, struct memory_v2 *out) {
    struct memory old = {0, 0, 0};
    int number = nvmlDeviceGetMemoryInfo(h, &old);
    out->total = old.total; out->free = old.free; out->used = old.used; out->reserved = 0;
    return number;
}
struct margin { uint version; int degrees; };
int nvmlDeviceGetMarginTemperature(void *h, struct margin *out) {
    ANSWER(nvmlDeviceGetMarginTemperature, of(h)); out->degrees = (int)value("margin", of(h), 40); return 0;
}
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, ull, "reasons", 1)
int nvmlDeviceGetRemappedRows(void *h, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    ANSWER(nvmlDeviceGetRemappedRows, of(h));
    *corrected = (uint)value("remapped", of(h), 0); *uncorrected = 0;
    *pending = (uint)value("remap_pending", of(h), 0); *failed = (uint)value("remap_failed", of(h), 0);
    return 0;
}
struct field { uint id, scope; long long at, latency; uint type, number; ull value; };
int nvmlDeviceGetFieldValues(void *h, int count, struct field *out) {
    ANSWER(nvmlDeviceGetFieldValues, of(h));
    out[0].type = 1; out[0].number = (uint)code("recovery_field", of(h)); out[0].value = value("recovery", of(h), 0);
    return 0;
}
#endif
