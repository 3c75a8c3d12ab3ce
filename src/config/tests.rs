use super::*;
use core::ffi::CStr;

/// Settings from a made-up environment.
fn with(entries: &[&CStr]) -> Config {
    let mut list: Vec<*const c_char> = entries.iter().map(|e| e.as_ptr()).collect();
    list.push(core::ptr::null());
    let mut config = default_config();
    config.fill(Env(list.as_ptr()));
    config
}

fn complaints(config: &Config) -> Vec<&'static str> {
    config.complaints.list.iter().flatten().map(|c| c.id.setting().env).collect()
}

#[test]
fn defaults() {
    for c in [with(&[]), with(&[c"PATH=/bin", c"RINGSOCK_SPIN_US=", c"RINGSOCK_SPIN", c"X_RINGSOCK_LINKS=none"])] {
        assert_eq!(c.links, Links { shm: true, verbs: true, verbs_named: false });
        assert_eq!((c.spin, c.ring_bytes, c.ring_max), (Spin::Auto, 16384, 4 << 20));
        assert_eq!((c.upgrade_after, c.upgrade_bytes), (8, 65536));
        assert!(c.peers.any && c.log_to.is_none() && c.report.is_none() && c.rules_path.is_none());
        assert_eq!((c.log_level, c.gid_index, c.test_protocol), (Level::Warn, None, None));
        assert!(complaints(&c).is_empty());
    }
}

/// The defaults in the table that people see are the ones that hold.
#[test]
fn the_table_tells_the_defaults() {
    for (&id, setting) in Id::ALL.iter().zip(SETTINGS) {
        let mut c = default_config();
        if !setting.default.is_empty() {
            c.apply(id, setting.default.as_bytes());
        }
        let d = default_config();
        assert!(complaints(&c).is_empty(), "{}", setting.env);
        assert_eq!((c.links, c.spin, c.ring_bytes, c.ring_max), (d.links, d.spin, d.ring_bytes, d.ring_max));
        assert_eq!((c.upgrade_after, c.upgrade_bytes, c.log_level), (d.upgrade_after, d.upgrade_bytes, d.log_level));
        assert!(c.peers.any && c.gid_index.is_none() && c.log_to.is_none());
    }
}

#[test]
fn links() {
    let links = |v: &[u8]| parse_links(v).map(|l| (l.shm, l.verbs, l.verbs_named));
    assert_eq!(links(b""), Some((false, false, false)));
    assert_eq!(links(b"none"), Some((false, false, false)));
    assert_eq!(links(b"shm"), Some((true, false, false)));
    assert_eq!(links(b"verbs, shm"), Some((true, true, true)));
    assert_eq!(links(b"shm,none"), None);
    assert_eq!(links(b"smh"), None);
    assert!(!with(&[c"RINGSOCK_LINKS="]).links.shm);
}

#[test]
fn numbers_and_sizes() {
    assert_eq!(with(&[c"RINGSOCK_SPIN_US=50"]).spin, Spin::Us(50));
    assert_eq!(with(&[c"RINGSOCK_SPIN_US=0"]).spin, Spin::Us(0));
    assert_eq!(with(&[c"RINGSOCK_RING_BYTES=64K"]).ring_bytes, 65536);
    assert_eq!(with(&[c"RINGSOCK_RING_MAX=64m"]).ring_max, 64 << 20);
    assert_eq!(with(&[c"RINGSOCK_UPGRADE_AFTER=0"]).upgrade_after, 0);
    assert_eq!(with(&[c"RINGSOCK_UPGRADE_BYTES=1M"]).upgrade_bytes, 1 << 20);
    assert_eq!(with(&[c"RINGSOCK_GID_INDEX=3"]).gid_index, Some(3));
    assert!(with(&[c"RINGSOCK_ISOLATION=strict"]).strict);
    assert!(!with(&[c"RINGSOCK_ISOLATION=shared"]).strict);
    assert_eq!(with(&[c"RINGSOCK_TEST_PROTOCOL=7"]).test_protocol, Some(7));
    assert_eq!(with(&[c"RINGSOCK_CHAOS=18446744073709551615"]).chaos, Some(u64::MAX));
    assert_eq!(with(&[c"RINGSOCK_CHAOS=x"]).chaos, None);
    assert_eq!(parse_size(b"99999999999999999999"), None);
    assert_eq!(parse_size(b"18446744073709551615K"), None);
    assert_eq!(parse_size(b"K"), None);
    assert_eq!(parse_number(b"+1", 0, 9), None);
}

#[test]
fn what_is_not_understood_is_named_and_the_default_holds() {
    let c = with(&[
        c"RINGSOCK_SPIN_US=fast",
        c"RINGSOCK_RING_BYTES=5000",
        c"RINGSOCK_RING_MAX=128M",
        c"RINGSOCK_LINKS=shm;verbs",
        c"RINGSOCK_UPGRADE_AFTER=-1",
        c"RINGSOCK_LOG=loud",
        c"RINGSOCK_GID_INDEX=256",
        c"RINGSOCK_ISOLATION=on",
    ]);
    assert_eq!((c.spin, c.ring_bytes, c.ring_max, c.upgrade_after), (Spin::Auto, 16384, 4 << 20, 8));
    assert!(c.links.shm && c.links.verbs && c.log_level == Level::Warn);
    assert_eq!(complaints(&c).len(), 8);
}

#[test]
fn a_ring_max_below_the_first_size_is_not_used() {
    let c = with(&[c"RINGSOCK_RING_BYTES=1M", c"RINGSOCK_RING_MAX=64K"]);
    assert_eq!((c.ring_bytes, c.ring_max), (1 << 20, 4 << 20));
    assert_eq!(complaints(&c), ["RINGSOCK_RING_MAX"]);
}

#[test]
fn log_targets() {
    let c = with(&[c"RINGSOCK_LOG=debug"]);
    assert!(c.log_level == Level::Debug && c.log_to.is_none());
    let c = with(&[c"RINGSOCK_LOG=info,/tmp/a.%p.log"]);
    assert_eq!(c.log_to.unwrap().as_bytes(), b"/tmp/a.%p.log");
    assert!(parse_log(b"info,relative").is_none() && parse_log(b",stderr").is_none());
    assert!(parse_log(b"off,stderr").is_some_and(|(l, to)| l == Level::Off && to.is_none()));
}

#[test]
fn peers() {
    let allows = |list: &[u8], uid, gid| {
        let mut c = Complaints::NONE;
        parse_peers(list, &mut c).map(|p| p.allows(uid, gid, 1000))
    };
    assert_eq!(allows(b"any", 7, 7), Some(true));
    assert_eq!(allows(b"same-user", 1000, 7), Some(true));
    assert_eq!(allows(b"same-user", 7, 1000), Some(false));
    assert_eq!(allows(b"root, 1001,@50", 0, 9), Some(true));
    assert_eq!(allows(b"root, 1001,@50", 1001, 9), Some(true));
    assert_eq!(allows(b"root, 1001,@50", 50, 9), Some(false));
    assert_eq!(allows(b"root, 1001,@50", 9, 50), Some(true));
    assert_eq!(allows(b"@root", 9, 0), Some(true));
    assert_eq!(allows(b"same-user,root", 1000, 9), Some(true));
    assert_eq!(allows(b"root", 1000, 9), Some(false));
    assert_eq!(allows(b"any,root", 0, 0), None);
    assert_eq!(allows(b"a b", 0, 0), None);
    assert_eq!(allows(b"root,,x", 0, 0), None);
}

#[test]
fn a_list_of_peers_never_fails_open() {
    let c = with(&[c"RINGSOCK_PEERS=no such"]);
    assert!(c.peers.allows(1000, 0, 1000) && !c.peers.allows(1, 0, 1000));
    assert_eq!(complaints(&c), ["RINGSOCK_PEERS"]);
    let c = with(&[c"RINGSOCK_PEERS=no-such-user-here"]);
    assert!(!c.peers.allows(1000, 0, 1000) && !c.peers.allows(1, 0, 1000));
    assert_eq!(c.complaints.unknown_peer.unwrap().as_bytes(), b"no-such-user-here");
    let list = (0..100u32).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    let mut complaints = Complaints::NONE;
    let peers = parse_peers(list.as_bytes(), &mut complaints).unwrap();
    assert!(complaints.too_many_peers && peers.allows(63, 0, 1000) && !peers.allows(64, 0, 1000));
}

#[test]
fn text_in_place() {
    let expand = |t: &[u8]| Text::<16>::new(t).unwrap().expand(42).map(|t| t.as_bytes().to_vec());
    assert_eq!(expand(b"a.%p.b").unwrap(), b"a.42.b");
    assert_eq!(expand(b"%%p%x%").unwrap(), b"%p%x%");
    assert_eq!(Text::<8>::new(b"%p.%p").unwrap().expand(1234), None);
    assert!(Text::<4>::new(b"abcd").is_none() && Text::<4>::new(b"abc").is_some());
    assert!(Text::<4>::new(b"a\0b").is_none());
    assert_eq!(Text::<4>::cut(b"abcdef").as_bytes_with_nul(), b"abc\0");
}

#[test]
fn settings_by_any_of_their_names() {
    let s = Id::SpinUs.setting();
    assert!(s.named(b"spin_us") && s.named(b"RINGSOCK_SPIN_US") && s.named(b"Spin_Us"));
    assert!(!s.named(b"spin") && !s.named(b"") && !s.named(b"ringsock_"));
}

#[test]
fn rules_file_settings_hold_where_the_environment_is_silent() {
    let path = std::env::temp_dir().join(format!("ringsock-rules-{}", std::process::id()));
    std::fs::write(&path, "set spin_us=9\nset ring_bytes=32K\nset peers=oops oops\n").unwrap();
    let rules = std::ffi::CString::new(format!("RINGSOCK_RULES={}", path.display())).unwrap();
    let c = with(&[&rules, c"RINGSOCK_SPIN_US=4"]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!((c.spin, c.ring_bytes), (Spin::Us(4), 32768));
    assert_eq!(complaints(&c), ["RINGSOCK_PEERS"]);
    let c = with(&[c"RINGSOCK_RULES=/nonexistent"]);
    assert!(c.rules_path.is_some() && c.links.shm);
}

#[test]
fn many_threads_get_the_same_settings() {
    let threads: Vec<_> = (0..16).map(|_| std::thread::spawn(|| core::ptr::from_ref(get()) as usize)).collect();
    let seen: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    assert!(seen.windows(2).all(|w| w[0] == w[1]));
    let _ = peer_allowed(0, 0);
    assert_eq!(protocol(3), 3);
}

#[test]
fn every_setting_is_documented_with_its_default() {
    let doc = include_str!("../../docs/tuning.md");
    for s in SETTINGS {
        let row = doc.lines().find(|l| l.starts_with(&format!("| [`{}`]", s.env)));
        assert!(row.is_some_and(|r| s.default.is_empty() || r.contains(&format!("`{}`", s.default))), "{}", s.env);
    }
}
