import io.netty.bootstrap.Bootstrap;
import io.netty.bootstrap.ServerBootstrap;
import io.netty.buffer.ByteBuf;
import io.netty.channel.Channel;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import io.netty.channel.ChannelInitializer;
import io.netty.channel.ChannelOption;
import io.netty.channel.EventLoopGroup;
import io.netty.channel.ServerChannel;
import io.netty.channel.SimpleChannelInboundHandler;
import io.netty.channel.epoll.EpollEventLoopGroup;
import io.netty.channel.epoll.EpollServerSocketChannel;
import io.netty.channel.epoll.EpollSocketChannel;
import io.netty.channel.nio.NioEventLoopGroup;
import io.netty.channel.socket.nio.NioServerSocketChannel;
import io.netty.channel.socket.nio.NioSocketChannel;
import io.netty.handler.codec.LengthFieldBasedFrameDecoder;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.zip.CRC32;

/** The two ends of the netty check: `serve nio|epoll PORT` and `client nio|epoll PORT CONNECTIONS COUNT`. */
public final class NettyCheck {
    /** Messages of a connection that are in flight; flushed in gathered writes of this many. */
    private static final int BATCH = 16;

    private static EventLoopGroup group(String kind, int threads) {
        return kind.equals("epoll") ? new EpollEventLoopGroup(threads) : new NioEventLoopGroup(threads);
    }

    private static void serve(String kind, int port) throws Exception {
        EventLoopGroup loops = group(kind, 2);
        Class<? extends ServerChannel> type =
                kind.equals("epoll") ? EpollServerSocketChannel.class : NioServerSocketChannel.class;
        Channel c = new ServerBootstrap().group(loops).channel(type)
                .childOption(ChannelOption.TCP_NODELAY, true)
                .childHandler(new ChannelInitializer<Channel>() {
                    @Override
                    protected void initChannel(Channel ch) {
                        ch.pipeline().addLast(new ChannelInboundHandlerAdapter() {
                            @Override
                            public void channelRead(ChannelHandlerContext ctx, Object m) {
                                ctx.write(m);
                            }

                            @Override
                            public void channelReadComplete(ChannelHandlerContext ctx) {
                                ctx.flush();
                            }
                        });
                    }
                }).bind("127.0.0.1", port).sync().channel();
        c.closeFuture().sync();
    }

    /** A frame: its length, its number, its checksum, bytes that follow from the number. */
    private static ByteBuf frame(Channel ch, int seq) {
        int n = seq % 97 == 0 ? 60000 : seq % 7 == 0 ? 1024 : 16 + seq % 50;
        byte[] body = new byte[n];
        for (int i = 0; i < n; i++) {
            body[i] = (byte) (seq * 31 + i * 7);
        }
        CRC32 crc = new CRC32();
        crc.update(body);
        return ch.alloc().buffer(12 + n).writeInt(8 + n).writeInt(seq).writeInt((int) crc.getValue()).writeBytes(body);
    }

    private static final class Client extends SimpleChannelInboundHandler<ByteBuf> {
        private final int count;
        private final CountDownLatch done;
        private final AtomicReference<String> wrong;
        private int sent;
        private int seen;

        Client(int count, CountDownLatch done, AtomicReference<String> wrong) {
            this.count = count;
            this.done = done;
            this.wrong = wrong;
        }

        private void more(ChannelHandlerContext ctx) {
            for (int i = 0; i < BATCH && sent < count; i++) {
                ctx.write(frame(ctx.channel(), sent++));
            }
            ctx.flush();
        }

        @Override
        public void channelActive(ChannelHandlerContext ctx) {
            more(ctx);
        }

        @Override
        protected void channelRead0(ChannelHandlerContext ctx, ByteBuf m) {
            m.readInt();
            int seq = m.readInt();
            int sum = m.readInt();
            byte[] body = new byte[m.readableBytes()];
            m.readBytes(body);
            CRC32 crc = new CRC32();
            crc.update(body);
            if (seq != seen || sum != (int) crc.getValue()) {
                wrong.compareAndSet(null, "message " + seen + " carries number " + seq + " or other bytes");
                ctx.close();
                return;
            }
            seen++;
            if (seen == count) {
                ctx.close();
            } else if (seen == sent) {
                more(ctx);
            }
        }

        @Override
        public void channelInactive(ChannelHandlerContext ctx) {
            if (seen != count) {
                wrong.compareAndSet(null, "closed after " + seen + " of " + count);
            }
            done.countDown();
        }

        @Override
        public void exceptionCaught(ChannelHandlerContext ctx, Throwable e) {
            wrong.compareAndSet(null, e.toString());
            ctx.close();
        }
    }

    private static void client(String kind, int port, int connections, int count) throws Exception {
        EventLoopGroup loops = group(kind, 2);
        CountDownLatch done = new CountDownLatch(connections);
        AtomicReference<String> wrong = new AtomicReference<>();
        Bootstrap b = new Bootstrap().group(loops)
                .channel(kind.equals("epoll") ? EpollSocketChannel.class : NioSocketChannel.class)
                .option(ChannelOption.TCP_NODELAY, true)
                .handler(new ChannelInitializer<Channel>() {
                    @Override
                    protected void initChannel(Channel ch) {
                        ch.pipeline().addLast(new LengthFieldBasedFrameDecoder(1 << 20, 0, 4),
                                new Client(count, done, wrong));
                    }
                });
        long t = System.nanoTime();
        for (int i = 0; i < connections; i++) {
            b.connect("127.0.0.1", port).sync();
        }
        if (!done.await(100, TimeUnit.SECONDS)) {
            System.out.println("BAD still waiting after 100 s");
            System.exit(1);
        }
        double secs = (System.nanoTime() - t) / 1e9;
        if (wrong.get() != null) {
            System.out.println("BAD " + wrong.get());
            System.exit(1);
        }
        loops.shutdownGracefully(0, 5, TimeUnit.SECONDS).sync();
        System.out.printf("OK %d messages, %.0f/s%n", (long) connections * count, connections * (double) count / secs);
    }

    public static void main(String[] a) throws Exception {
        if (a[0].equals("serve")) {
            serve(a[1], Integer.parseInt(a[2]));
        } else {
            client(a[1], Integer.parseInt(a[2]), Integer.parseInt(a[3]), Integer.parseInt(a[4]));
        }
    }
}
