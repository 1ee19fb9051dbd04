//! Writes log lines from a thread of its own: a request never waits for a terminal or a full pipe.
//!
//! Lines gather for a moment and go out together. Waking the thread for each line would cost a request more than
//! formatting the line does, by the two system calls and by what they do to the scheduler.

use std::{
    io::{self, Write},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use tracing_subscriber::fmt::MakeWriter;

/// So long lines gather, from the first one on.
const GATHERING: Duration = Duration::from_millis(5);

/// More bytes than this do not wait to be written. What comes on top is lost, and its number is told.
const MOST_WAITING: usize = 4 * 1024 * 1024;

/// So long the end of the process waits for the last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

/// What lines are written to.
#[derive(Clone, Debug, Default)]
pub(super) struct LineWriter(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    bytes: Vec<u8>,
    lost: u64,
    /// Nothing more comes.
    ended: bool,
    /// All of it is written.
    written: bool,
}

impl Shared {
    /// A panic while this is locked can have lost a line, and nothing else.
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for lines. Nothing more comes after the end.
    fn next(&self) -> Option<(Vec<u8>, u64)> {
        let is_idle = |waiting: &mut Waiting| waiting.bytes.is_empty() && !waiting.ended;
        let waiting =
            self.changed.wait_while(self.waiting(), is_idle).unwrap_or_else(PoisonError::into_inner);
        let still_gathers = |waiting: &mut Waiting| !waiting.ended && waiting.bytes.len() < MOST_WAITING / 2;
        let gathered = self.changed.wait_timeout_while(waiting, GATHERING, still_gathers);
        let (mut waiting, _) = gathered.unwrap_or_else(PoisonError::into_inner);
        let lines = (std::mem::take(&mut waiting.bytes), std::mem::take(&mut waiting.lost));
        (!lines.0.is_empty()).then_some(lines)
    }
}

/// Dropped, it waits until the last line is written, but not for ever: whoever reads them may have stopped.
#[derive(Debug)]
pub struct WriterGuard(LineWriter);

impl Drop for WriterGuard {
    fn drop(&mut self) {
        let shared = &self.0.0;
        let mut waiting = shared.waiting();
        waiting.ended = true;
        shared.changed.notify_all();
        let is_unwritten = |waiting: &mut Waiting| !waiting.written;
        drop(shared.changed.wait_timeout_while(waiting, LAST_LINES, is_unwritten));
    }
}

/// Starts the thread that writes to `output`.
pub(super) fn start(output: impl Write + Send + 'static) -> io::Result<(LineWriter, WriterGuard)> {
    let writer = LineWriter::default();
    let shared = writer.0.clone();
    thread::Builder::new().name("log".to_owned()).spawn(move || write_all(&shared, output))?;
    Ok((writer.clone(), WriterGuard(writer)))
}

/// An output that fails is tried again with the next lines: a log that is gone must not end what it is about.
fn write_all(shared: &Shared, mut output: impl Write) {
    while let Some((lines, lost)) = shared.next() {
        let _ = output.write_all(&lines);
        if lost > 0 {
            // Legible for people and for machines, whichever format the others have.
            let fields = format!(
                "{{\"message\":\"log lines came faster than they could be written\",\"lost\":{lost}}}"
            );
            let _ = writeln!(
                output,
                "{{\"level\":\"WARN\",\"fields\":{fields},\"target\":\"tollgate::logging\"}}"
            );
        }
    }
    shared.waiting().written = true;
    shared.changed.notify_all();
}

impl<'a> MakeWriter<'a> for LineWriter {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> &'a Self {
        self
    }
}

/// Each call is one line.
impl Write for &LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut waiting = self.0.waiting();
        let is_first = waiting.bytes.is_empty();
        if waiting.bytes.len() + line.len() > MOST_WAITING {
            waiting.lost += 1;
        } else {
            waiting.bytes.extend_from_slice(line);
        }
        drop(waiting);
        if is_first {
            self.0.changed.notify_all();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Hands over what is written, and waits until it is taken.
    struct Slow(mpsc::SyncSender<Vec<u8>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn rest(receiver: &mpsc::Receiver<Vec<u8>>) -> String {
        String::from_utf8(receiver.iter().flatten().collect()).unwrap()
    }

    #[test]
    fn every_line_is_written_in_order_before_the_end() {
        let (sender, receiver) = mpsc::sync_channel(1000);
        let (writer, guard) = start(Slow(sender)).unwrap();
        let expected: String = (0..500).map(|n| format!("line {n}\n")).collect();
        expected.split_inclusive('\n').for_each(|line| (&writer).write_all(line.as_bytes()).unwrap());
        drop(guard);
        assert_eq!(rest(&receiver), expected);
    }

    #[test]
    fn a_blocked_output_delays_nobody_and_what_is_lost_is_told() {
        let (sender, receiver) = mpsc::sync_channel(0);
        let (writer, guard) = start(Slow(sender)).unwrap();
        let line = [b'x'; 1024];
        (0..2 * MOST_WAITING / line.len() + 2000).for_each(|_| (&writer).write_all(&line).unwrap());
        let reader = thread::spawn(move || rest(&receiver));
        drop(guard);
        drop(writer);
        let written = reader.join().unwrap();
        assert!(written.len() <= 2 * MOST_WAITING + 1000, "{} bytes waited", written.len());
        assert!(written.contains("\"lost\":"));
    }
}
