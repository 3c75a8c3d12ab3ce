//! As much of JSON as the reports need, strictly.

use std::collections::BTreeMap;

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true`, `false`
    Bool(bool),
    /// A number; counts are exact up to 2^53.
    Num(f64),
    /// A string.
    Str(String),
    /// An array.
    List(Vec<Json>),
    /// An object.
    Map(BTreeMap<String, Json>),
}

impl Json {
    /// Parses a whole text.
    pub fn parse(text: &str) -> Result<Json, String> {
        let mut p = Parser { b: text.as_bytes(), at: 0 };
        let v = p.value()?;
        p.space();
        match p.at == p.b.len() {
            true => Ok(v),
            false => Err(format!("more after the value at byte {}", p.at)),
        }
    }

    /// A member of an object; panics where there is none.
    pub fn get(&self, key: &str) -> &Json {
        match self {
            Json::Map(m) => m.get(key).unwrap_or_else(|| panic!("no {key:?} in {self:?}")),
            _ => panic!("{key:?} is asked of {self:?}"),
        }
    }

    /// A count.
    pub fn num(&self) -> u64 {
        match self {
            Json::Num(n) if *n >= 0.0 && n.fract() == 0.0 => *n as u64,
            _ => panic!("{self:?} is not a count"),
        }
    }

    /// The elements of an array.
    pub fn list(&self) -> &[Json] {
        match self {
            Json::List(l) => l,
            _ => panic!("{self:?} is not an array"),
        }
    }

    /// The text of a string, `None` for null.
    pub fn text(&self) -> Option<&str> {
        match self {
            Json::Str(s) => Some(s),
            Json::Null => None,
            _ => panic!("{self:?} is not a string"),
        }
    }
}

struct Parser<'a> {
    b: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn space(&mut self) {
        while matches!(self.b.get(self.at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn eat(&mut self, c: u8) -> Result<(), String> {
        self.space();
        match self.b.get(self.at) {
            Some(&x) if x == c => {
                self.at += 1;
                Ok(())
            }
            x => Err(format!("{:?} expected at byte {}, found {:?}", c as char, self.at, x.map(|&b| b as char))),
        }
    }

    fn peek(&mut self) -> u8 {
        self.space();
        self.b.get(self.at).copied().unwrap_or(0)
    }

    fn word(&mut self, w: &str, v: Json) -> Result<Json, String> {
        match self.b[self.at..].starts_with(w.as_bytes()) {
            true => {
                self.at += w.len();
                Ok(v)
            }
            false => Err(format!("nonsense at byte {}", self.at)),
        }
    }

    fn value(&mut self) -> Result<Json, String> {
        match self.peek() {
            b'{' => {
                self.eat(b'{')?;
                let mut m = BTreeMap::new();
                while self.peek() != b'}' {
                    if !m.is_empty() {
                        self.eat(b',')?;
                    }
                    self.space();
                    let k = self.string()?;
                    self.eat(b':')?;
                    let v = self.value()?;
                    if m.insert(k.clone(), v).is_some() {
                        return Err(format!("{k:?} twice"));
                    }
                }
                self.eat(b'}')?;
                Ok(Json::Map(m))
            }
            b'[' => {
                self.eat(b'[')?;
                let mut l = Vec::new();
                while self.peek() != b']' {
                    if !l.is_empty() {
                        self.eat(b',')?;
                    }
                    l.push(self.value()?);
                }
                self.eat(b']')?;
                Ok(Json::List(l))
            }
            b'"' => self.string().map(Json::Str),
            b't' => self.word("true", Json::Bool(true)),
            b'f' => self.word("false", Json::Bool(false)),
            b'n' => self.word("null", Json::Null),
            _ => {
                let from = self.at;
                while matches!(self.b.get(self.at), Some(b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E')) {
                    self.at += 1;
                }
                let s = String::from_utf8_lossy(&self.b[from..self.at]);
                s.parse().map(Json::Num).map_err(|_| format!("nonsense at byte {from}"))
            }
        }
    }

    fn string(&mut self) -> Result<String, String> {
        self.eat(b'"')?;
        let mut out = Vec::new();
        loop {
            let c = *self.b.get(self.at).ok_or("an unfinished string")?;
            self.at += 1;
            match c {
                b'"' => return String::from_utf8(out).map_err(|e| e.to_string()),
                b'\\' => {
                    let e = *self.b.get(self.at).ok_or("an unfinished string")?;
                    self.at += 1;
                    match e {
                        b'n' => out.push(b'\n'),
                        b't' => out.push(b'\t'),
                        b'r' => out.push(b'\r'),
                        b'b' => out.push(8),
                        b'f' => out.push(12),
                        b'u' => {
                            let hex = self.b.get(self.at..self.at + 4).ok_or("an unfinished escape")?;
                            let hex = std::str::from_utf8(hex).map_err(|e| e.to_string())?;
                            let n = u32::from_str_radix(hex, 16).map_err(|e| e.to_string())?;
                            let ch = char::from_u32(n).unwrap_or('\u{fffd}');
                            out.extend_from_slice(ch.encode_utf8(&mut [0; 4]).as_bytes());
                            self.at += 4;
                        }
                        other => out.push(other),
                    }
                }
                0..=31 => return Err(format!("a bare control character at byte {}", self.at - 1)),
                c => out.push(c),
            }
        }
    }
}
