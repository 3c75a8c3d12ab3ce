import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.SocketChannel;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

/**
 * The two ends of the check of virtual threads: `serve PORT` and `client PORT CONNECTIONS COUNT`. A message is its length and so
 * many bytes, and comes back. (Compiled by a JDK that has no virtual threads yet.)
 */
public final class VirtualThreadsCheck {
    private static final int MOST = 200_000;

    private static ExecutorService virtual() throws Exception {
        return (ExecutorService) Executors.class.getMethod("newVirtualThreadPerTaskExecutor").invoke(null);
    }

    private static byte[] message(int seq, int size) {
        byte[] b = new byte[size];
        for (int i = 0; i < size; i++) {
            b[i] = (byte) (seq * 31 + i * 7 + (i >> 8));
        }
        return b;
    }

    private static int size(int seq) {
        return 1 + (seq * 977) % (seq % 50 == 49 ? MOST : 3000);
    }

    private static void right(byte[] got, int seq) {
        if (!java.util.Arrays.equals(got, message(seq, got.length))) {
            throw new IllegalStateException("message " + seq + " came back with other bytes");
        }
    }

    private static Void answer(Socket s) throws Exception {
        try (s) {
            s.setTcpNoDelay(true);
            DataInputStream in = new DataInputStream(s.getInputStream());
            DataOutputStream out = new DataOutputStream(s.getOutputStream());
            while (true) {
                int n = in.readInt();
                if (n < 0) {
                    return null;
                }
                byte[] b = in.readNBytes(n);
                // In pieces, so that who reads has to wait now and then.
                ByteBuffer head = ByteBuffer.allocate(4).putInt(n);
                out.write(head.array());
                for (int at = 0; at < n; at += 70_000) {
                    out.write(b, at, Math.min(70_000, n - at));
                }
            }
        }
    }

    private static void serve(int port) throws Exception {
        ExecutorService threads = virtual();
        try (ServerSocket l = new ServerSocket(port, 100, InetAddress.getLoopbackAddress())) {
            while (true) {
                Socket s = l.accept();
                threads.submit(() -> answer(s));
            }
        }
    }

    private static Integer stream(int port, int count) throws Exception {
        try (Socket s = new Socket(InetAddress.getLoopbackAddress(), port)) {
            s.setTcpNoDelay(true);
            DataInputStream in = new DataInputStream(s.getInputStream());
            DataOutputStream out = new DataOutputStream(s.getOutputStream());
            for (int seq = 0; seq < count; seq++) {
                byte[] b = message(seq, size(seq));
                out.writeInt(b.length);
                out.write(b);
                byte[] got = new byte[in.readInt()];
                in.readFully(got);
                if (got.length != b.length) {
                    throw new IllegalStateException("message " + seq + ": " + got.length + " bytes of " + b.length);
                }
                right(got, seq);
                if (seq % 200 == 199) {
                    // Nothing comes: a wait that ends by itself.
                    s.setSoTimeout(20);
                    try {
                        in.read();
                        throw new IllegalStateException("a byte of nothing");
                    } catch (SocketTimeoutException e) {
                        s.setSoTimeout(0);
                    }
                }
            }
            out.writeInt(-1);
            if (in.read() >= 0) {
                throw new IllegalStateException("more than was asked for");
            }
            return count;
        }
    }

    /** The same by a selector: its set is put into another while a virtual thread waits for it. */
    private static Integer select(int port, int count) throws Exception {
        try (Selector selector = Selector.open();
                SocketChannel c = SocketChannel.open(new InetSocketAddress(InetAddress.getLoopbackAddress(), port))) {
            c.configureBlocking(false);
            c.register(selector, SelectionKey.OP_READ);
            for (int seq = 0; seq < count; seq++) {
                byte[] b = message(seq, 1 + seq % 1000);
                ByteBuffer out = ByteBuffer.allocate(4 + b.length).putInt(b.length).put(b).flip();
                while (out.hasRemaining()) {
                    c.write(out);
                }
                ByteBuffer in = ByteBuffer.allocate(4 + b.length);
                while (in.hasRemaining()) {
                    if (c.read(in) < 0) {
                        throw new IllegalStateException("the end, at message " + seq);
                    }
                    if (in.hasRemaining() && selector.select(30_000) == 0) {
                        throw new IllegalStateException("message " + seq + " was not noticed");
                    }
                    selector.selectedKeys().clear();
                }
                byte[] got = new byte[in.flip().getInt()];
                in.get(got);
                right(got, seq);
            }
            return count;
        }
    }

    private static void client(int port, int connections, int count) throws Exception {
        ExecutorService threads = virtual();
        List<Future<Integer>> all = new ArrayList<>();
        for (int i = 0; i < connections; i++) {
            boolean selects = i % 4 == 3;
            Callable<Integer> one = () -> selects ? select(port, count) : stream(port, count);
            all.add(threads.submit(one));
        }
        int sum = 0;
        for (Future<Integer> f : all) {
            sum += f.get(200, TimeUnit.SECONDS);
        }
        System.out.println("OK " + sum + " messages");
    }

    public static void main(String[] a) throws Exception {
        if (a[0].equals("serve")) {
            serve(Integer.parseInt(a[1]));
        } else {
            client(Integer.parseInt(a[1]), Integer.parseInt(a[2]), Integer.parseInt(a[3]));
        }
    }
}
