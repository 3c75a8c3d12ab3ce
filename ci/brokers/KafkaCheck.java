import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.Random;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import java.util.zip.CRC32;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Apache Kafka's own Java client: `KafkaCheck WHERE TOPIC SEED COUNT ACKS`. Produces to and consumes from four
 * partitions at the same time, over connections of their own; every record is checked, in order in each partition.
 */
public final class KafkaCheck {
    private static final int PARTITIONS = 4;
    /** Records that the producer may be ahead of the consumer. */
    private static final int AHEAD = 2000;
    private static final byte[] POOL = new byte[1 << 16];

    private static byte[] record(int seq, int size) {
        int at = (int) ((seq * 7919L) % (POOL.length - size + 1));
        CRC32 crc = new CRC32();
        crc.update(POOL, at, size);
        return ByteBuffer.allocate(12 + size).putInt(seq).putInt(size).putInt((int) crc.getValue())
                .put(POOL, at, size).array();
    }

    private static void check(byte[] got, int seq) {
        ByteBuffer b = ByteBuffer.wrap(got);
        int number = b.getInt();
        int size = b.getInt();
        int sum = b.getInt();
        CRC32 crc = new CRC32();
        crc.update(got, 12, got.length - 12);
        if (number != seq || size != got.length - 12 || sum != (int) crc.getValue()) {
            throw new IllegalStateException("record " + seq + ": carries number " + number + ", " + got.length
                    + " bytes, of " + (size + 12));
        }
    }

    private static Properties common(String where) {
        Properties p = new Properties();
        p.put("bootstrap.servers", where);
        p.put("key.serializer", ByteArraySerializer.class.getName());
        p.put("value.serializer", ByteArraySerializer.class.getName());
        p.put("key.deserializer", ByteArrayDeserializer.class.getName());
        p.put("value.deserializer", ByteArrayDeserializer.class.getName());
        return p;
    }

    public static void main(String[] args) throws Exception {
        String where = args[0];
        String topic = args[1];
        Random random = new Random(Long.parseLong(args[2]));
        int count = Integer.parseInt(args[3]) / PARTITIONS * PARTITIONS;
        random.nextBytes(POOL);
        try (Admin admin = Admin.create(common(where))) {
            admin.createTopics(List.of(new NewTopic(topic, PARTITIONS, (short) 1))).all().get(60, TimeUnit.SECONDS);
        } catch (ExecutionException e) {
            if (!String.valueOf(e.getCause()).contains("TopicExists")) {
                throw e;
            }
        }
        AtomicInteger seen = new AtomicInteger();
        AtomicReference<Throwable> wrong = new AtomicReference<>();
        Thread consumer = new Thread(() -> {
            Properties p = common(where);
            p.put("auto.offset.reset", "earliest");
            p.put("fetch.max.wait.ms", "20");
            try (KafkaConsumer<byte[], byte[]> c = new KafkaConsumer<>(p)) {
                List<TopicPartition> all = new ArrayList<>();
                for (int i = 0; i < PARTITIONS; i++) {
                    all.add(new TopicPartition(topic, i));
                }
                c.assign(all);
                c.seekToBeginning(all);
                int[] next = new int[PARTITIONS];
                long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
                while (seen.get() < count && wrong.get() == null) {
                    for (ConsumerRecord<byte[], byte[]> r : c.poll(Duration.ofMillis(100))) {
                        check(r.value(), next[r.partition()]++);
                        seen.incrementAndGet();
                        until = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
                    }
                    if (System.nanoTime() > until) {
                        throw new IllegalStateException("nothing for 60 s after " + seen.get());
                    }
                }
            } catch (Throwable e) {
                wrong.compareAndSet(null, e);
            }
        });
        consumer.start();
        Properties p = common(where);
        p.put("acks", args[4]);
        p.put("enable.idempotence", "false");
        p.put("max.in.flight.requests.per.connection", "1");
        p.put("linger.ms", "1");
        AtomicInteger done = new AtomicInteger();
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(p)) {
            for (int n = 0; n < count && wrong.get() == null; n++) {
                int size = (int) Math.pow(2, 4 + random.nextDouble() * 10);
                byte[] r = record(n / PARTITIONS, size);
                producer.send(new ProducerRecord<>(topic, n % PARTITIONS, null, r), (m, e) -> {
                    if (e != null) {
                        wrong.compareAndSet(null, e);
                    }
                    done.incrementAndGet();
                });
                while (n - seen.get() > AHEAD && wrong.get() == null) {
                    producer.flush();
                    Thread.sleep(1);
                }
            }
            producer.flush();
        }
        consumer.join(120_000);
        if (wrong.get() != null) {
            throw new IllegalStateException(wrong.get());
        }
        if (seen.get() != count || done.get() != count) {
            throw new IllegalStateException(seen + " seen, " + done + " delivered of " + count);
        }
        System.out.println("{\"messages\": " + count + "}");
    }
}
