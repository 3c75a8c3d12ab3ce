// Messages of 1 B to 1 MiB around a ring of processes, every byte checked, with a sum over all of them after each; then a
// ping-pong of one byte. Prints its half round-trip time in microseconds.

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned char byte_at(int i, int round, int rank) { return (unsigned char)(i * 31 + (i >> 8) + round + rank); }

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int rounds = atoi(argv[1]), trips = atoi(argv[2]);
    static unsigned char out[1 << 20], in[1 << 20];
    int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    long wrong = 0;
    for (int round = 0; round < rounds; round++) {
        int size = 1 + round * 7919 % (1 << 20);
        for (int i = 0; i < size; i++) out[i] = byte_at(i, round, rank);
        MPI_Sendrecv(out, size, MPI_BYTE, next, 0, in, size, MPI_BYTE, last, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < size; i++) wrong += in[i] != byte_at(i, round, last);
        long mine = (long)round * rank, all;
        MPI_Allreduce(&mine, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        wrong += all != (long)round * ranks * (ranks - 1) / 2;
    }
    double began = MPI_Wtime();
    unsigned char x = 1;
    for (int i = 0; i < trips && rank < 2; i++) {
        if (rank == 0) MPI_Send(&x, 1, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(&x, 1, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1) MPI_Send(&x, 1, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    }
    double each = (MPI_Wtime() - began) / trips / 2 * 1e6;
    long everywhere;
    MPI_Allreduce(&wrong, &everywhere, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("wrong %ld, %.2f us\n", everywhere, each);
    MPI_Finalize();
    return everywhere != 0;
}
