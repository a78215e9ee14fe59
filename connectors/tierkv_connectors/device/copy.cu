// Copies runs of bytes between an engine's pages and a canonical block. Plain C with CUDA's names,
// so that a C compiler can check it too; `table.py` makes the tables and says what is in them.

#define AXES 8
#define SPANS 240

struct Table {
    unsigned int spans;
    unsigned int words;                   // of each span
    unsigned int to_pages;                // 0: from pages to the block
    unsigned int axes;
    unsigned int sizes[AXES];             // in words, the last axis fastest
    long long page_steps[AXES];           // bytes
    long long block_steps[AXES];
    unsigned long long pages[SPANS];      // addresses
    unsigned long long blocks[SPANS];
};

// One span for each blockIdx.y; its words are shared out over all threads along x.
#define COPY(name, word)                                                                          \
    extern "C" __global__ void name(const struct Table table) {                                   \
        char *page = (char *)table.pages[blockIdx.y];                                             \
        char *block = (char *)table.blocks[blockIdx.y];                                           \
        unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;                     \
        unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;        \
        for (; at < table.words; at += step) {                                                    \
            unsigned int rest = (unsigned int)at;                                                 \
            long long in_page = 0, in_block = 0;                                                  \
            for (int axis = (int)table.axes - 1; axis >= 0; axis--) {                             \
                unsigned int next = rest / table.sizes[axis];                                     \
                unsigned int index = rest - next * table.sizes[axis];                             \
                in_page += index * table.page_steps[axis];                                        \
                in_block += index * table.block_steps[axis];                                      \
                rest = next;                                                                      \
            }                                                                                     \
            if (table.to_pages)                                                                   \
                *(word *)(page + in_page) = *(word *)(block + in_block);                          \
            else                                                                                  \
                *(word *)(block + in_block) = *(word *)(page + in_page);                          \
        }                                                                                         \
    }

COPY(copy_1, unsigned char)
COPY(copy_2, unsigned short)
COPY(copy_4, unsigned int)
COPY(copy_8, unsigned long long)
