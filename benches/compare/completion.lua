-- wrk: the same request every time; one line of JSON at the end. Latencies in milliseconds.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [[{"model":"made-up","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Say hello."}]}]]

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\n{"requests":%d,"micros":%d,"not_2xx":%d,"socket_errors":%d,"p50":%.3f,"p99":%.3f}\n',
    summary.requests, summary.duration, errors.status, errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
