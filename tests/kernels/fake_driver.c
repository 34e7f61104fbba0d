// Stands in for libcuda in tests: keeps what each launch is given, in the driver's own layout (cuda.h), and launches nothing.
#include <string.h>

typedef struct {
    int id, pad;
    int value[16];
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    Attribute* attributes;
    unsigned num_attributes;
} Config;

typedef struct {
    unsigned grid[3], block[3], shared_bytes, num_attributes;
    void *stream, *function;
    int attributes[2][4];  // of each its id and the first three words of its value
    char params[1024];
} Launch;

Launch launches[8];
int count = 0, status = 0, params_bytes = 0, attribute_bytes = sizeof(Attribute), config_bytes = sizeof(Config);

int cuLaunchKernelEx(const Config* config, void* function, void** params, void** extra) {
    Launch* launch = &launches[count++ % 8];
    memset(launch, 0, sizeof(*launch));
    memcpy(launch->grid, config->grid, sizeof(launch->grid));
    memcpy(launch->block, config->block, sizeof(launch->block));
    launch->shared_bytes = config->shared_bytes;
    launch->stream = config->stream;
    launch->num_attributes = config->num_attributes;
    for (unsigned i = 0; i < config->num_attributes && i < 2; i++) {
        launch->attributes[i][0] = config->attributes[i].id;
        memcpy(&launch->attributes[i][1], config->attributes[i].value, 3 * sizeof(int));
    }
    launch->function = function;
    memcpy(launch->params, params[0], params_bytes);
    return extra ? 1 : status;
}
